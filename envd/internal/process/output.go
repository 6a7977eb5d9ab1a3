package process

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

const (
	pipeChunk = 32 << 10
	ptyChunk  = 16 << 10
	// After the main process ended a child of it may still hold the pipe. What
	// is in the pipe by then is delivered; more only while it comes quickly.
	drainIdle = 60 * time.Millisecond
	drainMax  = 300 * time.Millisecond
)

// output reads one pipe or terminal of a process until its end, and reports
// itself drained once nothing more belongs to the call.
type output struct {
	file    *os.File
	chunk   int
	publish func([]byte)
	drained chan struct{}
	once    sync.Once
	ended   atomic.Pointer[ending]
}

// ending is what was known of the pipe when the main process ended.
type ending struct {
	at    time.Time
	owed  int64 // bytes in the pipe at that time: these are always delivered
	after atomic.Int64
}

func newOutput(file *os.File, chunk int, publish func([]byte)) *output {
	return &output{file: file, chunk: chunk, publish: publish, drained: make(chan struct{})}
}

func (o *output) finish() { o.once.Do(func() { close(o.drained) }) }

// mainEnded tells the reader that the process is gone. It wakes a blocked read.
func (o *output) mainEnded() {
	o.ended.Store(&ending{at: time.Now(), owed: pending(o.file)})
	_ = o.file.SetReadDeadline(time.Now().Add(drainIdle))
}

func (o *output) run() {
	defer o.file.Close()
	defer o.finish()
	buf := make([]byte, o.chunk)
	for {
		end := o.ended.Load()
		if end != nil {
			_ = o.file.SetReadDeadline(time.Now().Add(drainIdle))
		}
		n, err := o.file.Read(buf)
		if n > 0 {
			o.publish(append([]byte(nil), buf[:n]...))
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if o.undelivered(end) {
				continue
			}
			break
		}
		if err != nil {
			return
		}
		if end != nil && end.after.Add(int64(n)) >= end.owed && time.Since(end.at) > drainMax {
			break
		}
	}
	o.finish()
	o.discard(buf)
}

// undelivered says that a deadline passed only because this goroutine did not
// get the processor: what the process wrote is still there.
func (o *output) undelivered(end *ending) bool {
	return end == nil || (end.after.Load() < end.owed && pending(o.file) > 0)
}

// discard keeps the pipe open and empty for as long as a left-behind child
// writes to it: closing it would kill that child with SIGPIPE, leaving it full
// would stop it.
func (o *output) discard(buf []byte) {
	_ = o.file.SetReadDeadline(time.Time{})
	for {
		if _, err := o.file.Read(buf); err != nil {
			return
		}
	}
}

const fionread = 0x541b

func pending(f *os.File) int64 {
	conn, err := f.SyscallConn()
	if err != nil {
		return 0
	}
	var n int32
	_ = conn.Control(func(fd uintptr) {
		_, _, _ = syscall.Syscall(syscall.SYS_IOCTL, fd, fionread, uintptr(unsafe.Pointer(&n)))
	})
	return int64(n)
}
