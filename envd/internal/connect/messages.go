package connect

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
)

// A message is a struct whose fields carry their protobuf number: `pb:"3"`, or
// `pb:"1,zigzag"` for a sint. The Go type gives the rest:
//
//	bool, int32, uint32, int64      number (of an enum too)
//	string, []byte                  themselves
//	struct                          message, always written
//	*T                              T with presence: optional, or member of a oneof
//	[]string, []struct, []*struct   repeated
//	map[string]string               map
//
// A field without a number is not on the wire.
type kind uint8

const (
	kindNumber kind = iota
	kindZigzag
	kindString
	kindBytes
	kindMessage
	kindMap
)

type field struct {
	number   uint64
	index    int
	kind     kind
	pointer  bool // a pointer in the struct, or in the slice
	repeated bool
}

type message struct {
	fields   []field
	byNumber map[uint64]*field
}

var messages sync.Map // reflect.Type -> *message

// messageOf is the table of a type. A type that cannot be one is a mistake in
// this program: it panics.
func messageOf(t reflect.Type) *message {
	if known, ok := messages.Load(t); ok {
		return known.(*message)
	}
	m := &message{byNumber: map[uint64]*field{}}
	for i := 0; i < t.NumField(); i++ {
		tag, ok := t.Field(i).Tag.Lookup("pb")
		if !ok {
			continue
		}
		f, err := fieldOf(t.Field(i).Type, tag)
		if err != nil {
			panic(fmt.Sprintf("connect: %s.%s: %v", t, t.Field(i).Name, err))
		}
		f.index = i
		m.fields = append(m.fields, f)
	}
	for i := range m.fields {
		m.byNumber[m.fields[i].number] = &m.fields[i]
	}
	known, _ := messages.LoadOrStore(t, m)
	return known.(*message)
}

func fieldOf(t reflect.Type, tag string) (f field, err error) {
	text, option, _ := strings.Cut(tag, ",")
	if f.number, err = strconv.ParseUint(text, 10, 29); err != nil {
		return f, err
	}
	if t.Kind() == reflect.Map {
		if t.Key().Kind() != reflect.String || t.Elem().Kind() != reflect.String {
			return f, fmt.Errorf("a map of %s", t)
		}
		f.kind = kindMap
		return f, nil
	}
	if t.Kind() == reflect.Slice && t.Elem().Kind() != reflect.Uint8 {
		f.repeated, t = true, t.Elem()
	}
	if t.Kind() == reflect.Pointer {
		f.pointer, t = true, t.Elem()
	}
	switch t.Kind() {
	case reflect.Bool, reflect.Int32, reflect.Uint32, reflect.Int64:
		if f.kind = kindNumber; option == "zigzag" {
			f.kind = kindZigzag
		}
	case reflect.String:
		f.kind = kindString
	case reflect.Slice:
		f.kind = kindBytes
	case reflect.Struct:
		f.kind = kindMessage
	default:
		return f, fmt.Errorf("no protobuf form of %s", t)
	}
	// Repeated numbers are packed on the wire, which no message of the protocol needs.
	if f.repeated && (f.kind == kindNumber || f.kind == kindZigzag) {
		return f, fmt.Errorf("repeated numbers")
	}
	return f, nil
}
