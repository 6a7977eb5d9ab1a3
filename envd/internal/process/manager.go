// Package process runs processes for clients: process.Process of the protocol.
package process

import (
	"os"
	"sort"
	"sync"
	"time"

	"aenv/envd/internal/connect"
	"aenv/envd/internal/freeze"
	"aenv/envd/internal/users"
)

// Settings is what the rest of the daemon knows about how to run a process.
type Settings interface {
	// RPCUser finds the user of a call by its Basic authorization.
	RPCUser(call *connect.Call) (*users.User, error)
	Workdir() string
	Env() map[string]string
}

// Manager holds the running processes.
type Manager struct {
	settings Settings
	freezer  *freeze.Freezer
	mu       sync.Mutex
	procs    map[int]*Proc
	sessions map[int]bool // leaders, kept while anything is left of the session
}

// NewManager makes an empty one.
func NewManager(settings Settings, freezer *freeze.Freezer) *Manager {
	return &Manager{settings: settings, freezer: freezer, procs: map[int]*Proc{}, sessions: map[int]bool{}}
}

// Pids lists the main processes, each the leader of its own session.
func (m *Manager) Pids() []int {
	m.mu.Lock()
	defer m.mu.Unlock()
	pids := make([]int, 0, len(m.procs))
	for pid := range m.procs {
		pids = append(pids, pid)
	}
	sort.Ints(pids)
	return pids
}

func (m *Manager) find(sel *Selector) (*Proc, error) {
	if sel == nil || (sel.Pid == nil && sel.Tag == nil) {
		return nil, connect.Errorf(connect.InvalidArgument, "the request names no process: give pid or tag")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if sel.Pid != nil {
		if p := m.procs[int(*sel.Pid)]; p != nil {
			return p, nil
		}
		return nil, connect.Errorf(connect.NotFound, "%s not found", sel)
	}
	var found *Proc
	for _, p := range m.procs {
		if p.tag != nil && *p.tag == *sel.Tag && (found == nil || p.pid > found.pid) {
			found = p
		}
	}
	if found == nil {
		return nil, connect.Errorf(connect.NotFound, "%s not found", sel)
	}
	return found, nil
}

// launch starts a process and subscribes first, so that no event is lost.
func (m *Manager) launch(call *connect.Call, req *StartRequest, first *subscriber) (*Proc, error) {
	if req.Process == nil {
		return nil, connect.Errorf(connect.InvalidArgument, "the request has no process")
	}
	cfg := req.Process
	u, err := m.settings.RPCUser(call)
	if err != nil {
		return nil, err
	}
	if err := checkEnvironment(cfg.Envs); err != nil {
		return nil, err
	}
	cwd, err := workingDirectory(cfg, u, m.settings.Workdir())
	if err != nil {
		return nil, err
	}
	env := environment(u, m.settings.Env(), cfg.Envs, req.Pty != nil)
	path, err := findExecutable(cfg.Cmd, cwd, env)
	if err != nil {
		return nil, err
	}
	attr, err := attributes(u, req.Pty != nil)
	if err != nil {
		return nil, err
	}
	f, err := m.open(req, u)
	if err != nil {
		return nil, startError(cfg.Cmd, err)
	}
	cmd := command(path, cfg, f)
	cmd.Dir, cmd.Env, cmd.SysProcAttr = cwd, env, attr
	var p *Proc
	if err := m.freezer.Start(call, attr, func() error {
		// A failed Cmd cannot be started again.
		cmd := *cmd
		// Held until the process is listed: nobody may see its pid before.
		m.mu.Lock()
		defer m.mu.Unlock()
		if err := cmd.Start(); err != nil {
			return err
		}
		p = &Proc{pid: cmd.Process.Pid, config: *cfg, tag: req.Tag, cmd: &cmd, pty: f.pty, stdin: f.stdin,
			subs: map[*subscriber]struct{}{first: {}}}
		normalOOM(p.pid)
		m.procs[p.pid] = p
		m.sessions[p.pid] = true
		return nil
	}); err != nil {
		f.closeAll()
		return nil, startError(cfg.Cmd, err)
	}
	for _, file := range f.child {
		_ = file.Close()
	}
	m.attend(p, f, call.Until)
	return p, nil
}

func (m *Manager) open(req *StartRequest, u *users.User) (*files, error) {
	if req.Pty == nil {
		return openPipes(req.Stdin == nil || *req.Stdin)
	}
	f, err := openTerminal(req.Pty)
	if err == nil && users.Privileged() {
		// tty(1), mesg(1) and su expect the terminal to belong to the user.
		_ = os.Chown(f.child[0].Name(), int(u.UID), -1)
	}
	return f, err
}

// attend reads the output, waits for the end and tells everybody.
func (m *Manager) attend(p *Proc, f *files, deadline time.Time) {
	var outputs []*output
	add := func(file *os.File, chunk int, event func([]byte) DataEvent) {
		o := newOutput(file, chunk, func(b []byte) {
			data := event(b)
			p.publish(Event{Data: &data})
		})
		outputs = append(outputs, o)
		go o.run()
	}
	if f.pty != nil {
		add(f.pty, ptyChunk, func(b []byte) DataEvent { return DataEvent{Pty: b} })
	} else {
		add(f.stdout, pipeChunk, func(b []byte) DataEvent { return DataEvent{Stdout: b} })
		add(f.stderr, pipeChunk, func(b []byte) DataEvent { return DataEvent{Stderr: b} })
	}
	// The limit belongs to the process: it holds when the client has left.
	var limit *time.Timer
	if !deadline.IsZero() {
		limit = time.AfterFunc(time.Until(deadline), func() { m.killListed(p) })
	}
	go func() {
		// Reaped under the lock: while a process is listed its pid is its own.
		waitExit(p.pid)
		m.mu.Lock()
		delete(m.procs, p.pid)
		_ = p.cmd.Wait()
		m.mu.Unlock()
		if limit != nil {
			limit.Stop()
		}
		if p.pty == nil {
			_ = p.closeStdin()
		}
		for _, o := range outputs {
			o.mainEnded()
		}
		for _, o := range outputs {
			<-o.drained
		}
		p.publishEnd(endEvent(p.cmd.ProcessState))
	}()
}

// killListed kills the session of a process that still runs. The lock keeps the
// pid from being freed and given to another process in between.
func (m *Manager) killListed(p *Proc) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.procs[p.pid] == p {
		KillSession(p.pid)
	}
}

// Sessions lists every session this daemon started that still has a live process in
// it, also when its leader is gone. For tests on a host, where nothing else may
// be touched.
func (m *Manager) Sessions() []int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.living()
}

// living wants the lock.
func (m *Manager) living() []int {
	alive := map[int]bool{}
	for _, st := range Processes() {
		if st.State != 'Z' && st.State != 'X' { // those wait for their parent only
			alive[st.Session] = true
		}
	}
	sessions := []int{}
	for pid := range m.sessions {
		if !alive[pid] {
			delete(m.sessions, pid)
			continue
		}
		sessions = append(sessions, pid)
	}
	return sessions
}

// Kill kills what is left of the session that a process of this daemon leads or
// led; false when nothing is.
func (m *Manager) Kill(pid int) bool {
	m.mu.Lock() // as in killListed
	defer m.mu.Unlock()
	for _, session := range m.living() {
		if session == pid {
			KillSession(pid)
			return true
		}
	}
	return false
}

// KillAll kills everything this daemon started.
func (m *Manager) KillAll() {
	for _, pid := range m.Sessions() {
		KillSession(pid)
	}
}
