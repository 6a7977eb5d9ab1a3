package connect

import (
	"net/http"
	"time"
)

// writeLimit bounds one write to a client. A connection that died without a
// word (its peer was left behind by a snapshot) must not hold a stream for ever.
const writeLimit = 5 * time.Minute

// stream writes the envelopes of one reply.
type stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	codec   Codec
	zip     bool
}

func newStream(w http.ResponseWriter, r *http.Request, codec Codec) *stream {
	zip := takesGzip(r.Header.Get("Connect-Accept-Encoding"))
	w.Header().Set("Content-Type", "application/connect+"+codec.Name())
	if zip {
		w.Header().Set("Connect-Content-Encoding", "gzip")
	}
	w.WriteHeader(http.StatusOK)
	return &stream{w: w, control: http.NewResponseController(w), codec: codec, zip: zip}
}

func (s *stream) write(flags byte, payload []byte) error {
	if s.zip && len(payload) >= minCompress {
		flags, payload = flags|flagCompressed, compress(payload)
	}
	_ = s.control.SetWriteDeadline(time.Now().Add(writeLimit))
	if _, err := s.w.Write(AppendEnvelope(make([]byte, 0, len(payload)+5), flags, payload)); err != nil {
		return err
	}
	return s.control.Flush()
}

func (s *stream) send(v any) error {
	payload, err := s.codec.Marshal(v)
	if err != nil {
		return err
	}
	return s.write(0, payload)
}

func (s *stream) end(err error) {
	_ = s.write(flagEnd, endPayload(err))
	// The connection may live on for other calls: they set their own limit.
	_ = s.control.SetWriteDeadline(time.Time{})
}
