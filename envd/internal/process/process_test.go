package process

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"aenv/envd/internal/connect"
	"aenv/envd/internal/freeze"
	"aenv/envd/internal/users"
)

type settings struct{ home string }

func (s settings) RPCUser(*connect.Call) (*users.User, error) {
	uid, gid := uint32(os.Getuid()), uint32(os.Getgid())
	return &users.User{Name: "me", UID: uid, GID: gid, Groups: []uint32{gid}, Home: s.home}, nil
}
func (s settings) Workdir() string        { return "" }
func (s settings) Env() map[string]string { return map[string]string{"GLOBAL": "g", "BOTH": "global"} }

func manager(t *testing.T) *Manager {
	m := NewManager(settings{t.TempDir()}, &freeze.Freezer{})
	t.Cleanup(func() {
		m.KillAll()
		for deadline := time.Now().Add(5 * time.Second); len(m.Sessions()) > 0; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Errorf("sessions left: %v", m.Sessions())
				return
			}
		}
	})
	return m
}

func newCall(limit time.Duration) (*connect.Call, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	call := &connect.Call{Context: ctx, Header: http.Header{}}
	if limit > 0 {
		call.Until = time.Now().Add(limit)
		call.Context, cancel = context.WithDeadline(context.Background(), call.Until)
	}
	return call, cancel
}

// seen collects the events of one stream.
type seen struct {
	mu             sync.Mutex
	out, errs, pty []byte
	pid            int
	order          []string
	end            *EndEvent
}

func (s *seen) send(v any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	ev := v.(EventMessage).Event
	switch {
	case ev.Start != nil:
		s.pid = int(ev.Start.Pid)
		s.order = append(s.order, "start")
	case ev.End != nil:
		s.end = ev.End
		s.order = append(s.order, "end")
	case ev.Keepalive != nil:
		s.order = append(s.order, "keepalive")
	case ev.Data != nil:
		s.out, s.errs = append(s.out, ev.Data.Stdout...), append(s.errs, ev.Data.Stderr...)
		s.pty = append(s.pty, ev.Data.Pty...)
	}
	return nil
}

func (s *seen) get(f func() bool) bool { s.mu.Lock(); defer s.mu.Unlock(); return f() }

func no() *bool { f := false; return &f }

func shell(script string) *StartRequest {
	return &StartRequest{Process: &Config{Cmd: "/bin/sh", Args: []string{"-c", script}}, Stdin: no()}
}

func run(t *testing.T, m *Manager, limit time.Duration, req *StartRequest) (*seen, error) {
	t.Helper()
	call, cancel := newCall(limit)
	defer cancel()
	s := &seen{}
	return s, m.start(call, req, s.send)
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func code(err error) connect.Code {
	if err == nil {
		return ""
	}
	return connect.AsError(err).Code
}

func TestEndsAreWordedLikeTheReference(t *testing.T) {
	m := manager(t)
	for script, want := range map[string]EndEvent{
		"exit 0":        {0, true, "exit status 0", nil},
		"exit 7":        {7, true, "exit status 7", nil},
		"kill -KILL $$": {-1, false, "signal: killed", nil},
		"kill -TERM $$": {-1, false, "signal: terminated", nil},
	} {
		s, err := run(t, m, 0, shell(script))
		if err != nil || s.end == nil {
			t.Fatalf("%s: %v", script, err)
		}
		got := *s.end
		if (got.Error == nil) != (got.ExitCode == 0) || (got.Error != nil && *got.Error != got.Status) {
			t.Errorf("%s: error %v", script, got.Error)
		}
		got.Error = nil
		if got != want || s.order[0] != "start" || s.order[len(s.order)-1] != "end" {
			t.Errorf("%s: %+v %v", script, got, s.order)
		}
	}
}

func TestAllOutputArrivesBeforeTheEnd(t *testing.T) {
	m := manager(t)
	s, err := run(t, m, 0, shell("head -c 3000000 /dev/zero; printf 'x\\377y\\303\\251' >&2"))
	if err != nil || len(s.out) != 3_000_000 || !bytes.Equal(s.errs, []byte("x\xffy\xc3\xa9")) {
		t.Errorf("%d bytes, stderr %q, %v", len(s.out), s.errs, err)
	}
}

func TestAChildThatHoldsThePipeDoesNotHoldTheCall(t *testing.T) {
	m := manager(t)
	file := filepath.Join(t.TempDir(), "alive")
	for _, script := range []string{"sleep 30 & echo done", "(while :; do echo noise; sleep 0.01; done) & echo done"} {
		begin := time.Now()
		s, err := run(t, m, 0, shell(script))
		if err != nil || !strings.HasPrefix(string(s.out), "done\n") && !strings.Contains(string(s.out), "done\n") {
			t.Errorf("%q %v", s.out, err)
		}
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("%s: held for %v", script, took)
		}
	}
	// It lives on: its later writes neither kill nor stop it.
	if _, err := run(t, m, 0, shell("(sleep 0.5; head -c 300000 /dev/zero; echo yes >"+file+") & echo done")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the child left behind wrote its output", func() bool { _, err := os.Stat(file); return err == nil })
}

func TestTheLimitKillsTheWholeSession(t *testing.T) {
	m := manager(t)
	begin := time.Now()
	s, err := run(t, m, 300*time.Millisecond, shell("sleep 31 & sleep 32 | sleep 33; sleep 34"))
	if code(err) != connect.DeadlineExceeded || time.Since(begin) > 5*time.Second || s.end != nil {
		t.Errorf("%v after %v, end %v", err, time.Since(begin), s.end)
	}
	eventually(t, "the session is gone", func() bool { return len(m.Sessions()) == 0 })
}

func TestTheLimitHoldsAfterTheClientLeft(t *testing.T) {
	m := manager(t)
	call, cancel := newCall(400 * time.Millisecond)
	ctx, leave := context.WithCancel(call.Context)
	call.Context = ctx
	defer cancel()
	go func() { time.Sleep(100 * time.Millisecond); leave() }()
	if err := m.start(call, shell("sleep 35"), (&seen{}).send); code(err) != connect.Canceled {
		t.Errorf("%v", err)
	}
	if len(m.Pids()) != 1 {
		t.Error("the process did not survive its client")
	}
	eventually(t, "the limit killed it", func() bool { return len(m.Pids()) == 0 })
}

func TestTerminal(t *testing.T) {
	m := manager(t)
	req := shell("test -t 0 && test -t 1 && stty size; read x; stty size; echo got $x $TERM")
	req.Pty = &PTY{Size: &Size{Cols: 100, Rows: 30}}
	call, cancel := newCall(0)
	defer cancel()
	s, done := &seen{}, make(chan error, 1)
	go func() { done <- m.start(call, req, s.send) }()
	eventually(t, "first size", func() bool { return s.get(func() bool { return strings.Contains(string(s.pty), "30 100") }) })
	pid := connect.Uint32(m.Pids()[0])
	sel := &Selector{Pid: &pid}
	if _, err := m.update(call, &UpdateRequest{sel, &PTY{&Size{Cols: 50, Rows: 20}}}); err != nil {
		t.Error(err)
	}
	text := connect.Bytes("hello\n")
	if _, err := m.sendInput(call, &InputRequest{sel, &Input{Stdin: &text}}); code(err) != connect.Internal {
		t.Errorf("stdin input to a terminal: %v", err)
	}
	if _, err := m.closeStdin(call, &SelectRequest{sel}); code(err) != connect.Unknown {
		t.Errorf("CloseStdin of a terminal: %v", err)
	}
	if _, err := m.sendInput(call, &InputRequest{sel, &Input{Pty: &text}}); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if out := string(s.pty); !strings.Contains(out, "20 50") || !strings.Contains(out, "got hello xterm-256color") {
		t.Errorf("%q", out)
	}
}

func TestInput(t *testing.T) {
	m := manager(t)
	call, cancel := newCall(0)
	defer cancel()
	req := shell("cat")
	req.Stdin = nil
	tag := "the-cat"
	req.Tag = &tag
	s, done := &seen{}, make(chan error, 1)
	go func() { done <- m.start(call, req, s.send) }()
	eventually(t, "it runs", func() bool { return len(m.Pids()) == 1 })
	sel := &Selector{Tag: &tag}
	one, two := connect.Bytes("one "), connect.Bytes("two")
	if _, err := m.sendInput(call, &InputRequest{sel, &Input{Stdin: &one}}); err != nil {
		t.Error(err)
	}
	messages := []*StreamInputRequest{
		{Start: &SelectRequest{sel}}, {Keepalive: &Empty{}}, {Data: &InputRequest{Input: &Input{Stdin: &two}}},
	}
	next := func() (*StreamInputRequest, error) {
		if len(messages) == 0 {
			return nil, io.EOF
		}
		head := messages[0]
		messages = messages[1:]
		return head, nil
	}
	if _, err := m.streamInput(call, next); err != nil {
		t.Error(err)
	}
	for want, in := range map[connect.Code]*Input{connect.Unimplemented: {}, connect.Internal: {Pty: &one}} {
		if _, err := m.sendInput(call, &InputRequest{sel, in}); code(err) != want {
			t.Errorf("%+v: %v", in, err)
		}
	}
	for i := 0; i < 2; i++ { // closing twice is no error, but cat may have ended by then
		if _, err := m.closeStdin(call, &SelectRequest{sel}); err != nil && (i == 0 || code(err) != connect.NotFound) {
			t.Error(err)
		}
	}
	if err := <-done; err != nil || string(s.out) != "one two" {
		t.Errorf("%q %v", s.out, err)
	}
	if _, err := m.sendInput(call, &InputRequest{sel, &Input{Stdin: &one}}); code(err) != connect.NotFound {
		t.Errorf("after the end: %v", err)
	}
}

func TestInputOfAProcessThatDoesNotReadEndsWithTheCall(t *testing.T) {
	m := manager(t)
	bg, stop := newCall(0)
	defer stop()
	req := shell("sleep 36")
	req.Stdin = nil
	go func() { _ = m.start(bg, req, (&seen{}).send) }()
	eventually(t, "it runs", func() bool { return len(m.Pids()) == 1 })
	pid, big := connect.Uint32(m.Pids()[0]), connect.Bytes(make([]byte, 1<<20))
	call, cancel := newCall(200 * time.Millisecond)
	defer cancel()
	_, err := m.sendInput(call, &InputRequest{&Selector{Pid: &pid}, &Input{Stdin: &big}})
	if code(err) != connect.DeadlineExceeded {
		t.Errorf("%v", err)
	}
}

func TestFeedIsAllOfTheInput(t *testing.T) {
	m := manager(t)
	call, cancel := newCall(0)
	defer cancel()
	for script, good := range map[string]bool{"cat": true, "exec 0<&-; sleep 0.5": false} {
		req := shell(script)
		req.Stdin = nil
		s, done := &seen{}, make(chan error, 1)
		go func() { done <- m.start(call, req, s.send) }()
		eventually(t, "it runs", func() bool { return len(m.Pids()) == 1 })
		data := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
		err := m.Feed(call, m.Pids()[0], bytes.NewReader(data))
		if (err == nil) != good {
			t.Errorf("%s: %v", script, err)
		}
		if err := <-done; err != nil || good && !bytes.Equal(s.out, data) {
			t.Errorf("%s: %v, %d bytes", script, err, len(s.out))
		}
	}
	if err := m.Feed(call, 1, bytes.NewReader(nil)); code(err) != connect.NotFound {
		t.Error(err)
	}
}
