package connect

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"
)

// MaxUnary bounds a unary request, also after decompression.
const MaxUnary = 4 << 20

// Call is what a method may know of its request beside the message.
type Call struct {
	context.Context
	Header http.Header
	// Until is set when the client sent Connect-Timeout-Ms.
	Until time.Time
}

// Ended words the end of a call by its limit or by its client.
func (c *Call) Ended() error {
	if c.Err() == nil || errors.Is(c.Err(), context.DeadlineExceeded) {
		return Errorf(DeadlineExceeded, "the time limit of the call (Connect-Timeout-Ms) has passed")
	}
	return c.Err()
}

// Over says that the caller is gone or its time has passed. The timer of the
// context may be later than another one of the same time.
func (c *Call) Over() bool {
	return c.Err() != nil || !c.Until.IsZero() && !time.Now().Before(c.Until)
}

func newCall(r *http.Request) (*Call, context.CancelFunc, error) {
	text := r.Header.Get("Connect-Timeout-Ms")
	if text == "" {
		return &Call{Context: r.Context(), Header: r.Header}, func() {}, nil
	}
	ms, err := strconv.ParseInt(text, 10, 64)
	if err != nil || ms < 0 || len(text) > 10 {
		return nil, nil, Errorf(InvalidArgument, "Connect-Timeout-Ms %q is not a number of at most 10 digits", text)
	}
	deadline := time.Now().Add(time.Duration(ms) * time.Millisecond)
	ctx, cancel := context.WithDeadline(r.Context(), deadline)
	return &Call{Context: ctx, Header: r.Header, Until: deadline}, cancel, nil
}

func readBounded(r io.Reader, limit int64) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, Errorf(InvalidArgument, "cannot read the request: %v", err)
	}
	if int64(len(body)) > limit {
		return nil, TooLargef("the request is over the limit of %d bytes", limit)
	}
	return body, nil
}

// Unary serves one request, one reply.
func Unary[Req, Res any](fn func(*Call, *Req) (*Res, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		codec, err := codecFor(r.Header.Get("Content-Type"), "application/")
		var body []byte
		if err == nil {
			body, err = unary(r, codec, fn)
		}
		if err != nil {
			WriteError(w, err)
			return
		}
		w.Header().Set("Content-Type", "application/"+codec.Name())
		w.Header().Set("Vary", "Accept-Encoding")
		if len(body) >= minCompress && takesGzip(r.Header.Get("Accept-Encoding")) {
			w.Header().Set("Content-Encoding", "gzip")
			body = compress(body)
		}
		_, _ = w.Write(body)
	})
}

func unary[Req, Res any](r *http.Request, codec Codec, fn func(*Call, *Req) (*Res, error)) ([]byte, error) {
	call, cancel, err := newCall(r)
	if err != nil {
		return nil, err
	}
	defer cancel()
	unzip, err := zipped(r.Header.Get("Content-Encoding"))
	if err != nil {
		return nil, err
	}
	body, err := readBounded(r.Body, MaxUnary)
	if err == nil && unzip {
		body, err = decompress(body, MaxUnary)
	}
	if err != nil {
		return nil, err
	}
	req := new(Req)
	if err := codec.Unmarshal(body, req); err != nil {
		return nil, err
	}
	res, err := fn(call, req)
	if err != nil {
		return nil, err
	}
	return codec.Marshal(res)
}

// ServerStream serves one request, many replies. Errors found before the first
// message travel in the end envelope too: the status is 200 always.
func ServerStream[Req any](fn func(*Call, *Req, func(any) error) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		codec, err := codecFor(r.Header.Get("Content-Type"), "application/connect+")
		req := new(Req)
		if err == nil {
			err = readOne(r, codec, req)
		}
		out := newStream(w, r, codec)
		if err != nil {
			out.end(err)
			return
		}
		call, cancel, err := newCall(r)
		if err != nil {
			out.end(err)
			return
		}
		defer cancel()
		out.end(fn(call, req, out.send))
	})
}

// readOne reads the whole body: only then does net/http notice that a client
// went away.
func readOne(r *http.Request, codec Codec, req any) error {
	unzip, err := zipped(r.Header.Get("Connect-Content-Encoding"))
	if err != nil {
		return err
	}
	payload, err := ReadEnvelope(r.Body, unzip)
	if err != nil {
		if errors.Is(err, io.EOF) {
			return Errorf(InvalidArgument, "the request holds no message")
		}
		return err
	}
	if n, _ := io.CopyN(io.Discard, r.Body, MaxEnvelope); n == MaxEnvelope {
		return TooLargef("the request goes on after its message")
	}
	return codec.Unmarshal(payload, req)
}

// ClientStream serves many requests, one reply. fn calls next until io.EOF.
func ClientStream[Req, Res any](fn func(call *Call, next func() (*Req, error)) (*Res, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		codec, err := codecFor(r.Header.Get("Content-Type"), "application/connect+")
		var res *Res
		if err == nil {
			res, err = clientStream(r, codec, fn)
		}
		out := newStream(w, r, codec)
		if err == nil {
			err = out.send(res)
		}
		out.end(err)
	})
}

func clientStream[Req, Res any](
	r *http.Request, codec Codec, fn func(*Call, func() (*Req, error)) (*Res, error),
) (*Res, error) {
	unzip, err := zipped(r.Header.Get("Connect-Content-Encoding"))
	if err != nil {
		return nil, err
	}
	call, cancel, err := newCall(r)
	if err != nil {
		return nil, err
	}
	defer cancel()
	return fn(call, func() (*Req, error) {
		payload, err := ReadEnvelope(r.Body, unzip)
		if err != nil {
			return nil, err
		}
		req := new(Req)
		return req, codec.Unmarshal(payload, req)
	})
}
