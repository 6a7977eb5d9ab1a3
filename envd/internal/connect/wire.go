package connect

import "fmt"

// The wire format of protobuf (protobuf.dev/programming-guides/encoding): a
// message is a sequence of fields, each a key (number and wire type) and a value.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireFixed32 = 5

	maxField = 1<<29 - 1
)

// malformed is what a hostile or broken client sent.
func malformed(format string, args ...any) error {
	return Errorf(InvalidArgument, "the request is not valid protobuf for this method: %s", fmt.Sprintf(format, args...))
}

func appendVarint(dst []byte, n uint64) []byte {
	for n >= 0x80 {
		dst = append(dst, byte(n)|0x80)
		n >>= 7
	}
	return append(dst, byte(n))
}

func appendKey(dst []byte, number, wire uint64) []byte { return appendVarint(dst, number<<3|wire) }

func appendBytes(dst []byte, number uint64, data []byte) []byte {
	dst = appendVarint(appendKey(dst, number, wireBytes), uint64(len(data)))
	return append(dst, data...)
}

// takeVarint reads one number of at most 64 bits.
func takeVarint(data []byte) (n uint64, rest []byte, err error) {
	for i, b := range data {
		// The tenth byte holds the 64th bit and nothing else.
		if i == 9 && b > 1 {
			return 0, nil, malformed("a number has more than 64 bits")
		}
		n |= uint64(b&0x7f) << (7 * i)
		if b < 0x80 {
			return n, data[i+1:], nil
		}
	}
	return 0, nil, malformed("it ends inside a number")
}

func takeFixed(data []byte, size int) ([]byte, error) {
	if len(data) < size {
		return nil, malformed("it ends inside a number of %d bytes", size)
	}
	return data[size:], nil
}

func takeBytes(data []byte) (value, rest []byte, err error) {
	size, rest, err := takeVarint(data)
	if err != nil {
		return nil, nil, err
	}
	// Compared before it is converted: a length near 2^64 must not become negative.
	if size > uint64(len(rest)) {
		return nil, nil, malformed("a field of %d bytes where %d are left", size, len(rest))
	}
	return rest[:size], rest[size:], nil
}

// raw is one field as it stands on the wire.
type raw struct {
	number, wire uint64
	varint       uint64
	bytes        []byte
}

func takeField(data []byte) (f raw, rest []byte, err error) {
	key, rest, err := takeVarint(data)
	if err != nil {
		return f, nil, err
	}
	f.number, f.wire = key>>3, key&7
	if f.number == 0 || f.number > maxField {
		return f, nil, malformed("field number %d", f.number)
	}
	switch f.wire {
	case wireVarint:
		f.varint, rest, err = takeVarint(rest)
	case wireBytes:
		f.bytes, rest, err = takeBytes(rest)
	case wireFixed64:
		rest, err = takeFixed(rest, 8)
	case wireFixed32:
		rest, err = takeFixed(rest, 4)
	default: // groups are of proto2, 6 and 7 of nobody
		err = malformed("wire type %d of field %d", f.wire, f.number)
	}
	return f, rest, err
}
