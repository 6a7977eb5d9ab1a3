package connect

import (
	"reflect"
	"sort"
	"strings"
)

// encode writes a message in the order of its struct; equal messages give equal bytes.
func encode(dst []byte, v reflect.Value) []byte {
	m := messageOf(v.Type())
	for i := range m.fields {
		f := &m.fields[i]
		value := v.Field(f.index)
		switch {
		case f.kind == kindMap:
			dst = encodeMap(dst, f.number, value)
		case f.repeated:
			for j := 0; j < value.Len(); j++ {
				dst = encodeValue(dst, f, reflect.Indirect(value.Index(j)))
			}
		case f.pointer:
			if !value.IsNil() {
				dst = encodeValue(dst, f, value.Elem())
			}
		case f.kind == kindMessage || !isDefault(value):
			dst = encodeValue(dst, f, value)
		}
	}
	return dst
}

// isDefault: a field without presence is written only if it says something.
func isDefault(v reflect.Value) bool {
	if v.Kind() == reflect.Slice {
		return v.Len() == 0
	}
	return v.IsZero()
}

func encodeValue(dst []byte, f *field, v reflect.Value) []byte {
	switch f.kind {
	case kindString:
		return appendBytes(dst, f.number, []byte(valid(v.String())))
	case kindBytes:
		return appendBytes(dst, f.number, v.Bytes())
	case kindMessage:
		return appendBytes(dst, f.number, encode(nil, v))
	case kindZigzag:
		n := v.Int()
		return appendVarint(appendKey(dst, f.number, wireVarint), uint64(n)<<1^uint64(n>>63))
	}
	return appendVarint(appendKey(dst, f.number, wireVarint), numberOf(v))
}

func numberOf(v reflect.Value) uint64 {
	switch {
	case v.Kind() == reflect.Bool && v.Bool():
		return 1
	case v.Kind() == reflect.Bool:
		return 0
	case v.CanUint():
		return v.Uint()
	}
	return uint64(v.Int())
}

// valid: names of files are bytes, strings of protobuf are UTF-8, and clients
// refuse others. JSON replaces them the same way.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func encodeMap(dst []byte, number uint64, v reflect.Value) []byte {
	keys := make([]string, 0, v.Len())
	for _, key := range v.MapKeys() {
		keys = append(keys, key.String())
	}
	sort.Strings(keys)
	for _, key := range keys {
		value := v.MapIndex(reflect.ValueOf(key).Convert(v.Type().Key())).String()
		entry := appendBytes(nil, 1, []byte(valid(key)))
		dst = appendBytes(dst, number, appendBytes(entry, 2, []byte(valid(value))))
	}
	return dst
}
