package process

import (
	"errors"
	"io"
	"net/http"
	"time"

	"aenv/envd/internal/connect"
)

// Handlers are the methods by name.
func (m *Manager) Handlers() map[string]http.Handler {
	return map[string]http.Handler{
		"List":        connect.Unary(m.list),
		"Start":       connect.ServerStream(m.start),
		"Connect":     connect.ServerStream(m.connect),
		"Update":      connect.Unary(m.update),
		"StreamInput": connect.ClientStream(m.streamInput),
		"SendInput":   connect.Unary(m.sendInput),
		"SendSignal":  connect.Unary(m.sendSignal),
		"CloseStdin":  connect.Unary(m.closeStdin),
	}
}

func (m *Manager) list(_ *connect.Call, _ *Empty) (*ListResponse, error) {
	res := &ListResponse{Processes: []Info{}}
	for _, pid := range m.Pids() {
		m.mu.Lock()
		p := m.procs[pid]
		m.mu.Unlock()
		if p != nil {
			res.Processes = append(res.Processes, Info{Config: p.config, Pid: uint32(pid), Tag: p.tag})
		}
	}
	return res, nil
}

func (m *Manager) start(call *connect.Call, req *StartRequest, send func(any) error) error {
	sub := newSubscriber()
	p, err := m.launch(call, req, sub)
	if err != nil {
		return err
	}
	defer p.unsubscribe(sub)
	return follow(call, p, sub, send)
}

func (m *Manager) connect(call *connect.Call, req *SelectRequest, send func(any) error) error {
	p, err := m.find(req.Process)
	if err != nil {
		return err
	}
	sub := newSubscriber()
	if !p.subscribe(sub) {
		return connect.Errorf(connect.NotFound, "%s not found", req.Process)
	}
	defer p.unsubscribe(sub)
	return follow(call, p, sub, send)
}

// follow sends the events of a process until its end or that of the call.
func follow(call *connect.Call, p *Proc, sub *subscriber, send func(any) error) error {
	if err := send(EventMessage{Event{Start: &StartEvent{Pid: uint32(p.pid)}}}); err != nil {
		return err
	}
	interval, err := call.PingInterval()
	if err != nil {
		return err
	}
	ping := time.NewTicker(interval)
	defer ping.Stop()
	for {
		// A client may be slower than its process: its limit comes first.
		if call.Err() != nil {
			return call.Ended()
		}
		select {
		case <-call.Done():
			return call.Ended()
		case <-ping.C:
			if err := send(EventMessage{Event{Keepalive: &Empty{}}}); err != nil {
				return err
			}
		case ev := <-sub.events:
			if ev.End != nil && call.Over() {
				return call.Ended() // it ended because the limit killed it
			}
			if err := send(EventMessage{ev}); err != nil {
				return err
			}
			if ev.End != nil {
				return nil
			}
		}
	}
}

func (m *Manager) update(_ *connect.Call, req *UpdateRequest) (*Empty, error) {
	p, err := m.find(req.Process)
	if err != nil {
		return nil, err
	}
	if req.Pty == nil || req.Pty.Size == nil {
		return &Empty{}, nil
	}
	if p.pty == nil {
		return nil, connect.Errorf(connect.FailedPrecondition, "process %d has no terminal to resize", p.pid)
	}
	if err := resize(p.pty, *req.Pty.Size); err != nil {
		return nil, connect.Errorf(connect.Internal, "cannot resize the terminal of process %d: %v", p.pid, err)
	}
	return &Empty{}, nil
}

func (m *Manager) sendInput(call *connect.Call, req *InputRequest) (*Empty, error) {
	p, err := m.find(req.Process)
	if err != nil {
		return nil, err
	}
	return &Empty{}, p.input(call, req.Input)
}

func (m *Manager) streamInput(call *connect.Call, next func() (*StreamInputRequest, error)) (*Empty, error) {
	var p *Proc
	for {
		req, err := next()
		if errors.Is(err, io.EOF) {
			if p == nil {
				return nil, connect.Errorf(connect.InvalidArgument, "the input stream holds no start message")
			}
			return &Empty{}, nil
		}
		if err != nil {
			return nil, err
		}
		switch {
		case req.Start != nil:
			if p, err = m.find(req.Start.Process); err != nil {
				return nil, err
			}
		case p == nil:
			return nil, connect.Errorf(connect.InvalidArgument, "the first message of an input stream must be start")
		case req.Data != nil:
			if err := p.input(call, req.Data.Input); err != nil {
				return nil, err
			}
		case req.Keepalive == nil:
			return nil, connect.Errorf(connect.Unimplemented, "the message is neither start, data nor keepalive")
		}
	}
}

func (m *Manager) sendSignal(_ *connect.Call, req *SignalRequest) (*Empty, error) {
	p, err := m.find(req.Process)
	if err != nil {
		return nil, err
	}
	return &Empty{}, p.signal(req.Signal)
}

func (m *Manager) closeStdin(_ *connect.Call, req *SelectRequest) (*Empty, error) {
	p, err := m.find(req.Process)
	if err != nil {
		return nil, err
	}
	return &Empty{}, p.closeStdin()
}
