package connect

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
)

// MaxEnvelope bounds one message of a stream, as it comes and as it is after
// decompression, so that a client cannot make the daemon allocate what a length
// prefix or a few bytes of gzip promise.
const MaxEnvelope = 16 << 20

const (
	flagCompressed = 0x01
	flagEnd        = 0x02
)

// ReadEnvelope reads one message; unzip says that messages may be compressed.
// io.EOF means the stream ended between two messages; a stream that ends inside
// one is an error.
func ReadEnvelope(r io.Reader, unzip bool) ([]byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, io.EOF
		}
		return nil, Errorf(InvalidArgument, "the request ends inside an envelope header")
	}
	compressed := head[0]&flagCompressed != 0
	if compressed && !unzip {
		return nil, Errorf(InvalidArgument, "a message is compressed and Connect-Content-Encoding does not say how")
	}
	size := binary.BigEndian.Uint32(head[1:])
	if size > MaxEnvelope {
		return nil, TooLargef("message of %d bytes is over the limit of %d", size, MaxEnvelope)
	}
	body, err := io.ReadAll(io.LimitReader(r, int64(size)))
	if err != nil {
		return nil, Errorf(InvalidArgument, "cannot read the message: %v", err)
	}
	if len(body) != int(size) {
		return nil, Errorf(InvalidArgument, "the request ends inside a message: %d of %d bytes", len(body), size)
	}
	if head[0]&flagEnd != 0 {
		return nil, io.EOF
	}
	if compressed {
		return decompress(body, MaxEnvelope)
	}
	return body, nil
}

// AppendEnvelope frames one message.
func AppendEnvelope(dst []byte, flags byte, payload []byte) []byte {
	dst = append(dst, flags)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(payload)))
	return append(dst, payload...)
}

// endPayload is JSON in every codec.
func endPayload(err error) []byte {
	if err == nil {
		return []byte("{}")
	}
	body, _ := json.Marshal(struct {
		Error *Error `json:"error"`
	}{AsError(err)})
	return body
}
