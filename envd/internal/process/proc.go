package process

import (
	"context"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"aenv/envd/internal/connect"
)

// Proc is one running process.
type Proc struct {
	pid    int
	config Config
	tag    *string
	cmd    *exec.Cmd
	pty    *os.File // master side, nil without a terminal

	inputMu sync.Mutex // keeps two writers from mixing their bytes
	stdinMu sync.Mutex // guards the field; never held while writing
	stdin   *os.File

	mu    sync.Mutex
	subs  map[*subscriber]struct{}
	ended bool
}

// subscriber receives the events of one stream. gone releases a publisher that
// waits for a subscriber which left.
type subscriber struct {
	events chan Event
	gone   chan struct{}
}

func newSubscriber() *subscriber {
	return &subscriber{events: make(chan Event, 16), gone: make(chan struct{})}
}

// subscribe adds a stream; false when the process has ended already.
func (p *Proc) subscribe(s *subscriber) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return false
	}
	p.subs[s] = struct{}{}
	return true
}

func (p *Proc) unsubscribe(s *subscriber) {
	p.mu.Lock()
	delete(p.subs, s)
	p.mu.Unlock()
	close(s.gone)
}

// publish hands an event to every stream and waits for slow ones: that is the
// back pressure a pipe would give. Without any stream the event is dropped.
func (p *Proc) publish(ev Event) {
	p.mu.Lock()
	subs := make([]*subscriber, 0, len(p.subs))
	for s := range p.subs {
		subs = append(subs, s)
	}
	p.mu.Unlock()
	for _, s := range subs {
		select {
		case s.events <- ev:
		case <-s.gone:
		}
	}
}

func (p *Proc) publishEnd(ev Event) {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.publish(ev)
}

// endEvent words the end the way the reference daemon does.
func endEvent(state *os.ProcessState) Event {
	end := &EndEvent{ExitCode: int32(state.ExitCode()), Exited: state.Exited(), Status: state.String()}
	if !state.Success() {
		text := end.Status
		end.Error = &text
	}
	return Event{End: end}
}

func (p *Proc) input(call *connect.Call, in *Input) error {
	switch {
	case in == nil || (in.Stdin == nil && in.Pty == nil):
		return connect.Errorf(connect.Unimplemented, "the input names neither stdin nor pty")
	case in.Stdin != nil && p.pty != nil:
		return connect.Errorf(connect.Internal, "process %d has a terminal: send pty input", p.pid)
	case in.Pty != nil && p.pty == nil:
		return connect.Errorf(connect.Internal, "process %d has no terminal: send stdin input", p.pid)
	case in.Pty != nil:
		return p.write(call, p.pty, *in.Pty)
	}
	p.stdinMu.Lock()
	stdin := p.stdin
	p.stdinMu.Unlock()
	if stdin == nil {
		return connect.Errorf(connect.Internal, "stdin of process %d is disabled or closed", p.pid)
	}
	return p.write(call, stdin, *in.Stdin)
}

// write gives up with the call, not before: a process that does not read its
// input blocks only the caller.
func (p *Proc) write(call *connect.Call, f *os.File, data []byte) error {
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if call.Err() != nil {
		return call.Ended()
	}
	fired := make(chan struct{})
	stop := context.AfterFunc(call, func() { _ = f.SetWriteDeadline(past); close(fired) })
	_, err := f.Write(data)
	if !stop() {
		<-fired
		_ = f.SetWriteDeadline(noDeadline)
	}
	if err == nil {
		return nil
	}
	if call.Err() != nil {
		return call.Ended()
	}
	return connect.Errorf(connect.Internal, "cannot write to the input of process %d: %v", p.pid, err)
}

func (p *Proc) closeStdin() error {
	if p.pty != nil {
		return connect.Errorf(connect.Unknown, "process %d has a terminal: send Ctrl-D (0x04) instead", p.pid)
	}
	p.stdinMu.Lock()
	defer p.stdinMu.Unlock()
	if p.stdin != nil {
		_ = p.stdin.Close() // also wakes a writer that waits in it
		p.stdin = nil
	}
	return nil
}

func (p *Proc) signal(s Signal) error {
	if s != Signal(syscall.SIGTERM) && s != Signal(syscall.SIGKILL) {
		return connect.Errorf(connect.Unimplemented, "only SIGNAL_SIGTERM and SIGNAL_SIGKILL are supported")
	}
	if err := p.cmd.Process.Signal(syscall.Signal(s)); err != nil {
		return connect.Errorf(connect.NotFound, "process with pid %d not found: %v", p.pid, err)
	}
	return nil
}
