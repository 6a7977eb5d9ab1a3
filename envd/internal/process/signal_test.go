package process

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"aenv/envd/internal/connect"
)

func TestSignals(t *testing.T) {
	m := manager(t)
	bg, stop := newCall(0)
	defer stop()
	s, done := &seen{}, make(chan error, 1)
	go func() {
		done <- m.start(bg, shell("trap 'echo caught; exit 4' TERM; echo up; while :; do sleep 0.02; done"), s.send)
	}()
	eventually(t, "the trap is set", func() bool { return s.get(func() bool { return string(s.out) == "up\n" }) })
	pid := connect.Uint32(m.Pids()[0])
	if _, err := m.sendSignal(bg, &SignalRequest{&Selector{Pid: &pid}, 2}); code(err) != connect.Unimplemented {
		t.Errorf("SIGINT: %v", err)
	}
	if _, err := m.sendSignal(bg, &SignalRequest{&Selector{Pid: &pid}, 15}); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil || s.end.ExitCode != 4 || string(s.out) != "up\ncaught\n" {
		t.Errorf("%v %+v %q", err, s.end, s.out)
	}
	if _, err := m.sendSignal(bg, &SignalRequest{&Selector{Pid: &pid}, 9}); code(err) != connect.NotFound {
		t.Errorf("after the end: %v", err)
	}
}

func TestKillReachesTheWholeSessionAlsoWithoutItsLeader(t *testing.T) {
	m := manager(t)
	bg, stop := newCall(0)
	defer stop()
	go func() { _ = m.start(bg, shell("sleep 51 & sleep 52 | sleep 53; true"), (&seen{}).send) }()
	eventually(t, "it runs", func() bool { return len(m.Pids()) == 1 })
	if pid := m.Pids()[0]; m.Kill(pid+100000) || !m.Kill(pid) {
		t.Error("the wrong one was found")
	}
	eventually(t, "the session is gone", func() bool { return len(m.Sessions()) == 0 })
	s, err := run(t, m, 0, shell("sleep 54 >/dev/null 2>&1 & true"))
	if err != nil || !m.Kill(s.pid) {
		t.Errorf("what a process left is not found: %v", err)
	}
	eventually(t, "it is gone too", func() bool { return !m.Kill(s.pid) })
}

func TestSeveralSubscribersAndNone(t *testing.T) {
	m := manager(t)
	call, leave := newCall(0)
	go func() {
		_ = m.start(call, shell("sleep 0.3; head -c 400000 /dev/zero; sleep 0.3; echo tail"), (&seen{}).send)
	}()
	eventually(t, "it runs", func() bool { return len(m.Pids()) == 1 })
	pid := connect.Uint32(m.Pids()[0])
	leave() // from here on the output has two other readers
	var wg sync.WaitGroup
	for i := 0; i < 2; i++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			c, cancel := newCall(0)
			defer cancel()
			s := &seen{}
			err := m.connect(c, &SelectRequest{&Selector{Pid: &pid}}, s.send)
			if err != nil || s.pid != int(pid) || len(s.out) != 400_005 || s.end == nil {
				t.Errorf("%v: %d bytes, %+v", err, len(s.out), s.end)
			}
		}()
	}
	wg.Wait()
	// Nobody listens: the output must not stop the process.
	file := filepath.Join(t.TempDir(), "through")
	call, leave = newCall(0)
	go func() {
		_ = m.start(call, shell("sleep 0.2; head -c 400000 /dev/zero; echo yes >"+file), (&seen{}).send)
	}()
	eventually(t, "it runs", func() bool { return len(m.Pids()) == 1 })
	leave()
	eventually(t, "the unread output was dropped", func() bool { _, err := os.Stat(file); return err == nil })
}

func TestWhatCannotStartSaysWhy(t *testing.T) {
	m := manager(t)
	plain, missing := filepath.Join(t.TempDir(), "plain"), "/no/such/dir"
	if err := os.WriteFile(plain, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	reasons := map[string]string{"not found in PATH": connect.CommandNotFound, "does not exist": connect.CommandNotFound,
		"is empty": "", "cannot be passed": ""}
	for _, text := range []string{"cwd '/no/such/dir' does not exist", "is not a directory", "permission denied",
		"is a directory", "cannot start"} {
		reasons[text] = connect.CommandNotExecutable
	}
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for text, cfg := range map[string]*Config{
		"cannot start":                      {Cmd: script},
		"cwd '/no/such/dir' does not exist": {Cmd: "/bin/sh", Cwd: &missing},
		"is not a directory":                {Cmd: "/bin/sh", Cwd: &plain},
		"not found in PATH":                 {Cmd: "no-such-command"},
		"does not exist":                    {Cmd: "/no/such/command"},
		"permission denied":                 {Cmd: plain},
		"is a directory":                    {Cmd: "/"},
		"is empty":                          {},
		"cannot be passed":                  {Cmd: "/bin/sh", Envs: map[string]string{"A=B": "x"}},
	} {
		_, err := run(t, m, 0, &StartRequest{Process: cfg})
		if code(err) != connect.InvalidArgument || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: %v", text, err)
		}
		if got := connect.AsError(err).Reason; got != reasons[text] {
			t.Errorf("%q: reason %q", text, got)
		}
	}
	if _, err := run(t, m, 0, &StartRequest{}); code(err) != connect.InvalidArgument {
		t.Error(err)
	}
}

func TestEnvironmentOrderAndOwnSession(t *testing.T) {
	m := manager(t)
	req := shell("echo $GLOBAL $BOTH $USER $HOME; cat; ps -o sid= -p $$ 2>/dev/null || echo $$")
	req.Process.Envs = map[string]string{"BOTH": "request"}
	s, err := run(t, m, 0, req)
	home := m.settings.(settings).home
	want := fmt.Sprintf("g request me %s\n", home)
	if err != nil || !strings.HasPrefix(string(s.out), want) || !strings.Contains(string(s.out), fmt.Sprint(s.pid)) {
		t.Errorf("%q %v", s.out, err)
	}
	if sid, _, _ := syscall.Syscall(syscall.SYS_GETSID, 0, 0, 0); int(sid) == s.pid {
		t.Error("the test shares the session")
	}
}

func TestKeepalive(t *testing.T) {
	m := manager(t)
	call, cancel := newCall(0)
	defer cancel()
	call.Header.Set("Keepalive-Ping-Interval", "1")
	s := &seen{}
	if err := m.start(call, shell("sleep 1.3"), s.send); err != nil || strings.Join(s.order, " ") != "start keepalive end" {
		t.Errorf("%v %v", s.order, err)
	}
}

func TestAClientThatStopsReadingDoesNotHoldTheOthersForEver(t *testing.T) {
	m := manager(t)
	call, cancel := newCall(0)
	defer cancel()
	broken := errors.New("broken pipe")
	err := m.start(call, shell("head -c 400000 /dev/zero"), func(v any) error {
		if v.(EventMessage).Event.Data != nil {
			return broken
		}
		return nil
	})
	if !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	eventually(t, "the process ended although nobody read", func() bool { return len(m.Pids()) == 0 })
}

func TestStatParsing(t *testing.T) {
	st, ok := parseStat(5, []byte("5 (a) b) R (x) S 1 2 77 0 -1 2097216 0"))
	if !ok || st.State != 'S' || st.Session != 77 || !st.Kernel {
		t.Errorf("%+v %v", st, ok)
	}
	for pid, entered := range map[int]bool{1: false, 9: true} {
		if st, ok := parseStat(pid, []byte("9 (envd) S 0 9 9 0 -1 0 0")); !ok || st.Entered != entered {
			t.Errorf("process %d without a parent: %+v %v", pid, st, ok)
		}
	}
}
