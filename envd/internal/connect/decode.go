package connect

import (
	"reflect"
	"unicode/utf8"
)

const (
	// maxElements bounds what repeated fields and maps of one request hold: two
	// bytes on the wire can be an element of many in memory.
	maxElements = 1 << 18
	// maxNesting is more than any message of the protocol has.
	maxNesting = 16
)

// decoder reads one request.
type decoder struct{ elements int }

// decode fills v, which may hold a part already: a message that comes twice is
// merged. A field that is unknown, or of another wire type, is skipped.
func (d *decoder) decode(data []byte, v reflect.Value, depth int) error {
	if depth > maxNesting {
		return malformed("messages are nested more than %d deep", maxNesting)
	}
	m := messageOf(v.Type())
	for len(data) > 0 {
		f, rest, err := takeField(data)
		if err != nil {
			return err
		}
		data = rest
		known := m.byNumber[f.number]
		if known == nil || known.wire() != f.wire {
			continue
		}
		if err := d.field(&f, known, v.Field(known.index), depth); err != nil {
			return err
		}
	}
	return nil
}

func (f *field) wire() uint64 {
	if f.kind == kindNumber || f.kind == kindZigzag {
		return wireVarint
	}
	return wireBytes
}

func (d *decoder) field(f *raw, known *field, v reflect.Value, depth int) error {
	if known.kind == kindMap || known.repeated {
		if d.elements++; d.elements > maxElements {
			return TooLargef("the request holds more than %d elements", maxElements)
		}
	}
	switch {
	case known.kind == kindMap:
		return d.entry(f.bytes, v, depth)
	case known.repeated:
		element := reflect.New(v.Type().Elem()).Elem()
		if err := d.value(f, known, present(element), depth); err != nil {
			return err
		}
		v.Set(reflect.Append(v, element))
		return nil
	}
	return d.value(f, known, present(v), depth)
}

// present is where a value goes: behind its pointer, which is made if need be.
func present(v reflect.Value) reflect.Value {
	if v.Kind() != reflect.Pointer {
		return v
	}
	if v.IsNil() {
		v.Set(reflect.New(v.Type().Elem()))
	}
	return v.Elem()
}

func (d *decoder) value(f *raw, known *field, v reflect.Value, depth int) error {
	switch known.kind {
	case kindString:
		if !utf8.Valid(f.bytes) {
			return malformed("field %d is not UTF-8", f.number)
		}
		v.SetString(string(f.bytes))
	case kindBytes:
		v.SetBytes(f.bytes)
	case kindMessage:
		return d.decode(f.bytes, v, depth+1)
	case kindZigzag:
		setNumber(v, f.varint>>1^-(f.varint&1))
	case kindNumber:
		setNumber(v, f.varint)
	}
	return nil
}

// setNumber keeps the low bits of a number that is too large, as the format says.
func setNumber(v reflect.Value, n uint64) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(n != 0)
	case reflect.Uint32:
		v.SetUint(uint64(uint32(n)))
	case reflect.Int32:
		v.SetInt(int64(int32(n)))
	default:
		v.SetInt(int64(n))
	}
}

// mapEntry is how a map is written: one message for each pair.
type mapEntry struct {
	Key   string `pb:"1"`
	Value string `pb:"2"`
}

func (d *decoder) entry(data []byte, v reflect.Value, depth int) error {
	var pair mapEntry
	if err := d.decode(data, reflect.ValueOf(&pair).Elem(), depth+1); err != nil {
		return err
	}
	if v.IsNil() {
		v.Set(reflect.MakeMap(v.Type()))
	}
	v.SetMapIndex(reflect.ValueOf(pair.Key), reflect.ValueOf(pair.Value))
	return nil
}
