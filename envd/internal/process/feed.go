package process

import (
	"context"
	"errors"
	"io"

	"aenv/envd/internal/connect"
)

const feedChunk = 64 << 10

// Feed copies all of r to the standard input of a process and then ends it. A
// process that ends before it read everything is an error.
func (m *Manager) Feed(ctx context.Context, pid int, r io.Reader) error {
	number := connect.Uint32(pid)
	p, err := m.find(&Selector{Pid: &number})
	if err != nil {
		return err
	}
	call, buf := &connect.Call{Context: ctx}, make([]byte, feedChunk)
	for {
		n, rerr := r.Read(buf)
		if n > 0 {
			data := connect.Bytes(buf[:n])
			if err := p.input(call, &Input{Stdin: &data}); err != nil {
				return err
			}
		}
		if errors.Is(rerr, io.EOF) {
			return p.closeStdin()
		}
		if rerr != nil {
			return connect.Errorf(connect.InvalidArgument, "the input ends early: %v", rerr)
		}
	}
}
