package connect

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"mime"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Codec turns messages into bytes. Nothing but codecFor knows which one serves a
// call: handlers are the same for all.
type Codec interface {
	Name() string
	Marshal(v any) ([]byte, error)
	Unmarshal(data []byte, v any) error
}

type jsonCodec struct{}

func (jsonCodec) Name() string                  { return "json" }
func (jsonCodec) Marshal(v any) ([]byte, error) { return json.Marshal(v) }

func (jsonCodec) Unmarshal(data []byte, v any) error {
	if len(data) == 0 {
		return nil
	}
	if err := json.Unmarshal(data, v); err != nil {
		return Errorf(InvalidArgument, "the request is not valid JSON for this method: %v", err)
	}
	return nil
}

type protoCodec struct{}

func (protoCodec) Name() string { return "proto" }

func (protoCodec) Marshal(v any) ([]byte, error) {
	return encode(nil, reflect.Indirect(reflect.ValueOf(v))), nil
}

func (protoCodec) Unmarshal(data []byte, v any) error {
	return new(decoder).decode(data, reflect.ValueOf(v).Elem(), 0)
}

// codecFor picks the codec by content type; JSON also for the error that there
// is no other.
func codecFor(contentType, prefix string) (Codec, error) {
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		media = strings.TrimSpace(contentType)
	}
	name, found := strings.CutPrefix(media, prefix)
	switch {
	case !found:
		return jsonCodec{}, Errorf(InvalidArgument, "content type %q: this method needs %sjson or %[2]sproto", contentType, prefix)
	case name == "json":
		return jsonCodec{}, nil
	case name == "proto":
		return protoCodec{}, nil
	}
	return jsonCodec{}, Errorf(InvalidArgument, "content type %q: unknown codec", contentType)
}

// Uint32 follows the JSON mapping of protobuf: a number, or a number in a string.
type Uint32 uint32

// UnmarshalJSON accepts both forms.
func (u *Uint32) UnmarshalJSON(data []byte) error {
	text := strings.Trim(string(data), `"`)
	if text == "null" {
		return nil
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return fmt.Errorf("%s is not an unsigned 32-bit number", data)
	}
	*u = Uint32(n)
	return nil
}

// Bytes is base64 on the wire; input may be the URL alphabet and unpadded.
type Bytes []byte

// UnmarshalJSON accepts standard and URL-safe base64.
func (b *Bytes) UnmarshalJSON(data []byte) error {
	var text *string
	if err := json.Unmarshal(data, &text); err != nil {
		return err
	}
	if text == nil {
		return nil
	}
	clean := strings.NewReplacer("-", "+", "_", "/").Replace(strings.TrimRight(*text, "="))
	raw, err := base64.RawStdEncoding.DecodeString(clean)
	if err != nil {
		return fmt.Errorf("bytes field is not base64: %w", err)
	}
	*b = raw
	return nil
}

// Timestamp is google.protobuf.Timestamp: RFC 3339 in JSON.
type Timestamp struct {
	Seconds int64 `pb:"1"`
	Nanos   int32 `pb:"2"`
}

// NewTimestamp converts.
func NewTimestamp(t time.Time) Timestamp {
	return Timestamp{Seconds: t.Unix(), Nanos: int32(t.Nanosecond())}
}

// MarshalJSON writes it in UTC.
func (t Timestamp) MarshalJSON() ([]byte, error) {
	return json.Marshal(time.Unix(t.Seconds, int64(t.Nanos)).UTC().Format(time.RFC3339Nano))
}
