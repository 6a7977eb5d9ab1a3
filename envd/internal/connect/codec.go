package connect

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"mime"
	"strconv"
	"strings"
)

// Codec turns messages into bytes. A protobuf codec is added by implementing
// this and returning it from codecFor; nothing else knows the encoding.
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

// codecFor picks the codec by content type. The name is known even when the
// codec is not, because a stream answers its error under the client's own type.
func codecFor(contentType, prefix string) (name string, codec Codec, err error) {
	media, _, perr := mime.ParseMediaType(contentType)
	if perr != nil {
		media = strings.TrimSpace(contentType)
	}
	name, found := strings.CutPrefix(media, prefix)
	switch {
	case !found:
		return "json", nil, Errorf(InvalidArgument, "content type %q: this method needs %sjson", contentType, prefix)
	case name == "json":
		return name, jsonCodec{}, nil
	case name == "proto":
		return name, nil, Errorf(Unimplemented, "the protobuf codec is not supported yet; use %sjson", prefix)
	}
	return "json", nil, Errorf(InvalidArgument, "content type %q: unknown codec", contentType)
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
