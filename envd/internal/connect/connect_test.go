package connect

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestACallIsOverAtItsTimeThoughItsContextIsLate(t *testing.T) {
	call := &Call{Context: context.Background(), Until: time.Now().Add(time.Hour)}
	if call.Over() || (&Call{Context: context.Background()}).Over() {
		t.Error("it is over before its time")
	}
	call.Until = time.Now()
	var ended *Error
	if !call.Over() || !errors.As(call.Ended(), &ended) || ended.Code != DeadlineExceeded {
		t.Error(call.Over(), call.Ended())
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	call = &Call{Context: gone, Until: time.Now().Add(time.Hour)}
	if !call.Over() || !errors.Is(call.Ended(), context.Canceled) {
		t.Error(call.Over(), call.Ended())
	}
}

func TestEnvelopeRoundTrip(t *testing.T) {
	wire := AppendEnvelope(AppendEnvelope(nil, 0, []byte("one")), 0, nil)
	r := bytes.NewReader(wire)
	for _, want := range []string{"one", ""} {
		got, err := ReadEnvelope(r, false)
		if err != nil || string(got) != want {
			t.Fatalf("got %q, %v; want %q", got, err, want)
		}
	}
	if _, err := ReadEnvelope(r, false); !errors.Is(err, io.EOF) {
		t.Fatalf("at the end: %v", err)
	}
}

func TestEnvelopeRefusesWhatItMust(t *testing.T) {
	huge := append([]byte{0}, binary.BigEndian.AppendUint32(nil, MaxEnvelope+1)...)
	for name, c := range map[string]struct {
		wire []byte
		code Code
	}{
		"cut header": {[]byte{0, 0}, InvalidArgument},
		"cut body":   {[]byte{0, 0, 0, 0, 9, 'x'}, InvalidArgument},
		"compressed": {[]byte{1, 0, 0, 0, 0}, InvalidArgument},
		"too large":  {huge, ResourceExhausted},
	} {
		_, err := ReadEnvelope(bytes.NewReader(c.wire), false)
		if err == nil || AsError(err).Code != c.code {
			t.Errorf("%s: %v, want code %s", name, err, c.code)
		}
		if tooLarge := AsError(err).Reason == TooLarge; tooLarge != (c.code == ResourceExhausted) {
			t.Errorf("%s: the reason is %q", name, AsError(err).Reason)
		}
	}
}

func TestAFullDiskHasItsReason(t *testing.T) {
	for err, reason := range map[error]string{
		syscall.ENOSPC: NoSpace, fmt.Errorf("x: %w", syscall.EDQUOT): NoSpace, syscall.ENOMEM: "", syscall.EAGAIN: "",
	} {
		if e := AsError(err); e.Reason != reason {
			t.Errorf("%v: the reason is %q, want %q", err, e.Reason, reason)
		}
	}
}

func TestErrorsKeepTheirMeaning(t *testing.T) {
	for _, c := range []struct {
		err    error
		code   Code
		status int
	}{
		{Errorf(AlreadyExists, "x"), AlreadyExists, 409},
		{fmt.Errorf("wrapped: %w", Errorf(Unauthenticated, "x")), Unauthenticated, 401},
		{&fs.PathError{Op: "open", Path: "x", Err: syscall.ENOENT}, NotFound, 404},
		{syscall.ELOOP, FailedPrecondition, 400},
		{syscall.ENOTDIR, InvalidArgument, 400},
		{syscall.EACCES, PermissionDenied, 403},
		{syscall.ENOSPC, ResourceExhausted, 429},
		{context.DeadlineExceeded, DeadlineExceeded, 504},
		{context.Canceled, Canceled, 499},
		{errors.New("x"), Internal, 500},
		{Errorf(Unimplemented, "x"), Unimplemented, 501},
	} {
		e := AsError(c.err)
		if e.Code != c.code || e.Code.HTTPStatus() != c.status {
			t.Errorf("%v: %s %d, want %s %d", c.err, e.Code, e.Code.HTTPStatus(), c.code, c.status)
		}
	}
}

func TestJSONMapping(t *testing.T) {
	var v struct {
		N Uint32 `json:"n"`
		B Bytes  `json:"b"`
	}
	for _, text := range []string{`{"n":7,"b":"//8="}`, `{"n":"7","b":"__8"}`} {
		v.B, v.N = nil, 0
		if err := json.Unmarshal([]byte(text), &v); err != nil || v.N != 7 || !bytes.Equal(v.B, []byte{0xff, 0xff}) {
			t.Errorf("%s: %v %v", text, v, err)
		}
	}
	for _, text := range []string{`{"n":-1}`, `{"n":4294967296}`, `{"b":"*"}`} {
		if json.Unmarshal([]byte(text), &v) == nil {
			t.Errorf("%s was accepted", text)
		}
	}
}

type echo struct {
	Text string `json:"text" pb:"1"`
}

func call(h http.Handler, contentType string, body []byte, headers ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest("POST", "/s/m", bytes.NewReader(body))
	r.Header.Set("Content-Type", contentType)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestUnaryForms(t *testing.T) {
	h := Unary(func(_ *Call, e *echo) (*echo, error) {
		if e.Text == "bad" {
			return nil, Errorf(NotFound, "nothing")
		}
		return e, nil
	})
	w := call(h, "application/json; charset=utf-8", []byte(`{"text":"a","other":1}`))
	if w.Code != 200 || w.Body.String() != `{"text":"a"}` || w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if w = call(h, "application/json", []byte(`{"text":"bad"}`)); w.Code != 404 ||
		w.Body.String() != `{"code":"not_found","message":"nothing"}` {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	for contentType, status := range map[string]int{"application/avro": 400, "text/plain": 400, "": 400} {
		if w = call(h, contentType, []byte(`{}`)); w.Code != status {
			t.Errorf("%q: %d, want %d", contentType, w.Code, status)
		}
	}
	if w = call(h, "application/json", []byte(`{`)); w.Code != 400 {
		t.Errorf("bad JSON: %d", w.Code)
	}
	if w = call(h, "application/json", []byte(`{}`), "Connect-Timeout-Ms", "soon"); w.Code != 400 {
		t.Errorf("bad time-out: %d", w.Code)
	}
	if w = call(h, "application/json", bytes.Repeat([]byte(" "), MaxUnary+1)); w.Code != 429 {
		t.Errorf("too large: %d", w.Code)
	}
}

func TestStreamErrorsTravelInTheEndEnvelope(t *testing.T) {
	h := ServerStream(func(_ *Call, e *echo, send func(any) error) error { return send(e) })
	w := call(h, "application/connect+json", AppendEnvelope(nil, 0, []byte(`{"text":"a"}`)))
	want := string(AppendEnvelope(AppendEnvelope(nil, 0, []byte(`{"text":"a"}`)), 2, []byte("{}")))
	if w.Code != 200 || w.Body.String() != want || w.Header().Get("Content-Type") != "application/connect+json" {
		t.Errorf("%d %q", w.Code, w.Body)
	}
	w = call(h, "application/connect+proto", AppendEnvelope(nil, 0, []byte("\x0a\x01a")))
	want = string(AppendEnvelope(AppendEnvelope(nil, 0, []byte("\x0a\x01a")), 2, []byte("{}")))
	if w.Code != 200 || w.Body.String() != want || w.Header().Get("Content-Type") != "application/connect+proto" {
		t.Errorf("%d %q", w.Code, w.Body)
	}
	if w = call(h, "application/connect+json", nil); !strings.Contains(w.Body.String(), "invalid_argument") {
		t.Errorf("no message: %q", w.Body)
	}
}

func TestClientStreamReadsToTheEnd(t *testing.T) {
	h := ClientStream(func(_ *Call, next func() (*echo, error)) (*echo, error) {
		out := &echo{}
		for {
			e, err := next()
			if errors.Is(err, io.EOF) {
				return out, nil
			}
			if err != nil {
				return nil, err
			}
			out.Text += e.Text
		}
	})
	wire := AppendEnvelope(AppendEnvelope(nil, 0, []byte(`{"text":"a"}`)), 0, []byte(`{"text":"b"}`))
	if w := call(h, "application/connect+json", wire); !strings.Contains(w.Body.String(), `{"text":"ab"}`) {
		t.Errorf("%q", w.Body)
	}
}
