package connect

import (
	"bytes"
	"compress/gzip"
	"io"
	"strings"
	"sync"
)

// minCompress: below it the frame of gzip costs more than it saves.
const minCompress = 1 << 10

var zipWriters = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(io.Discard, gzip.BestSpeed)
	return w
}}

func compress(data []byte) []byte {
	var out bytes.Buffer
	w := zipWriters.Get().(*gzip.Writer)
	defer zipWriters.Put(w)
	w.Reset(&out)
	_, _ = w.Write(data) // a buffer takes everything
	_ = w.Close()
	return out.Bytes()
}

// decompress undoes gzip; what would grow over the limit is refused, however
// small it came.
func decompress(data []byte, limit int64) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, Errorf(InvalidArgument, "the request says it is gzip and is not: %v", err)
	}
	return readBounded(r, limit)
}

// zipped says whether a request is compressed.
func zipped(encoding string) (bool, error) {
	switch strings.ToLower(strings.TrimSpace(encoding)) {
	case "", "identity":
		return false, nil
	case "gzip":
		return true, nil
	}
	return false, Errorf(Unimplemented, "unknown compression %q: supported encodings are gzip, identity", encoding)
}

// takesGzip reads a list of accepted encodings.
func takesGzip(accept string) bool {
	for _, part := range strings.Split(accept, ",") {
		name, params, _ := strings.Cut(part, ";")
		if strings.EqualFold(strings.TrimSpace(name), "gzip") {
			weight, weighted := strings.CutPrefix(strings.ReplaceAll(params, " ", ""), "q=")
			return !weighted || strings.Trim(weight, "0.") != ""
		}
	}
	return false
}
