// Package freeze stops every process of a user from a detach until the next
// /init, so that a copy of the machine runs none of their instructions before it
// has entropy, clock, names and token of its own.
package freeze

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"aenv/envd/internal/connect"
)

const (
	// stopLimit bounds the wait until all have stopped. One that is busy in the
	// kernel stops before its next instruction of its own, also after that.
	stopLimit = 2 * time.Second
	stopPoll  = 500 * time.Microsecond
	// aloneLimit is how long the machine runs frozen before it thaws by itself:
	// the node that detached it is gone. In a copy this clock starts when the copy
	// does, and a node gives up a copy that has not taken its identity within 130 s
	// (60 s and one last call), so that one never thaws as its parent.
	aloneLimit = 180
	// reservedThreads are the kernel's own (some 60 on one processor, 15 more for
	// each further one) and the daemon's.
	reservedThreads = 256
)

// Freezer holds the cgroup of all processes of users. The zero value freezes
// nothing.
type Freezer struct {
	Log func(format string, args ...any)

	dir    string
	tick   time.Duration
	gate   sync.RWMutex // held for reading while a process is being started
	group  *cgroup
	period chan struct{} // while frozen; closed at the end of that
	copied bool          // the last period ended in a copy
}

// Open makes the cgroup at dir, and keeps a part of the kernel's threads out of
// its reach. Without cgroup v2 there, the freezer says that it cannot freeze, and
// the daemon goes on without.
func Open(dir string, log func(string, ...any)) *Freezer {
	f := &Freezer{Log: log, dir: dir, tick: time.Second}
	if dir == "" {
		return f
	}
	var err error
	if f.group, err = openCgroup(dir); err != nil {
		log("processes are not frozen for a capture: %v", err)
	} else {
		for _, err := range []error{f.group.set(false), keepThreads(f.group)} {
			if err != nil {
				log("%v", err)
			}
		}
	}
	return f
}

func keepThreads(from *cgroup) error {
	text, err := os.ReadFile("/proc/sys/kernel/threads-max")
	if err != nil {
		return err
	}
	maxThreads, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	return from.limit(maxThreads, reservedThreads)
}

// Can says whether there is a cgroup.
func (f *Freezer) Can() bool {
	f.gate.RLock()
	defer f.gate.RUnlock()
	return f.group != nil
}

// Freeze stops all processes of users; again changes nothing.
func (f *Freezer) Freeze() error {
	f.gate.Lock() // no start is half done: its child would stop between fork and exec, and hold the daemon
	defer f.gate.Unlock()
	if f.group == nil || f.period != nil {
		return nil
	}
	if err := f.group.set(true); err != nil {
		return err
	}
	f.period = make(chan struct{})
	go f.alone(f.period)
	for end := time.Now().Add(stopLimit); ; time.Sleep(stopPoll) {
		stopped, err := f.group.frozen()
		if stopped || err != nil {
			return err
		}
		if time.Now().After(end) {
			f.Log("some processes have not stopped after %v", stopLimit)
			return nil
		}
	}
}

// Thaw lets them go on. restored says that this is a copy: what waited for it was
// asked of the machine that it is a copy of.
func (f *Freezer) Thaw(restored bool) {
	f.gate.Lock()
	defer f.gate.Unlock()
	if f.period == nil {
		return
	}
	if err := f.group.set(false); err != nil {
		f.Log("cannot thaw: %v", err)
	}
	f.copied = restored
	close(f.period)
	f.period = nil
}

// alone counts in steps: a clock that leaps forward when the machine was away
// then counts as one step.
func (f *Freezer) alone(period chan struct{}) {
	for i := 0; i < aloneLimit; i++ {
		select {
		case <-period:
			return
		case <-time.After(f.tick):
		}
	}
	f.gate.RLock()
	same := f.period == period
	f.gate.RUnlock()
	if same {
		f.Log("no /init after a detach: the processes go on")
		f.Thaw(false)
	}
}

// Start runs start while nothing is frozen, with the attributes that put the new
// process in the cgroup. It waits for the end of a freeze, as long as ctx.
func (f *Freezer) Start(ctx context.Context, attr *syscall.SysProcAttr, start func() error) error {
	if err := f.enter(ctx); err != nil {
		return err
	}
	err := f.within(attr, start)
	lost := err != nil && f.group != nil && f.lost(err)
	f.gate.RUnlock()
	if !lost {
		return err
	}
	if reopened, oerr := openCgroup(f.dir); oerr == nil {
		if lerr := keepThreads(reopened); lerr != nil {
			f.Log("%v", lerr)
		}
		f.replace(reopened)
	}
	if err := f.enter(ctx); err != nil {
		return err
	}
	defer f.gate.RUnlock()
	if err = f.within(attr, start); err != nil && f.lost(err) {
		attr.UseCgroupFD = false
		err = start()
	}
	return err
}

func (f *Freezer) within(attr *syscall.SysProcAttr, start func() error) error {
	if f.group != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, f.group.fd
	}
	return start()
}

// lost says that it is the cgroup that makes a start fail, not the command: it
// was removed, or the guest made it one of groups only.
func (f *Freezer) lost(err error) bool {
	if _, gone := f.group.frozen(); gone != nil {
		return true
	}
	return errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EOPNOTSUPP)
}

func (f *Freezer) replace(group *cgroup) {
	f.gate.Lock()
	defer f.gate.Unlock()
	if f.period != nil { // frozen meanwhile: that one is thawed by its own descriptor
		group.close()
		return
	}
	f.group.close()
	f.group = group
}

// enter returns with the gate held for reading and nothing frozen.
func (f *Freezer) enter(ctx context.Context) error {
	for waited := false; ; waited = true {
		f.gate.RLock()
		period := f.period
		if period == nil && !(waited && f.copied) {
			return nil
		}
		f.gate.RUnlock()
		if period == nil {
			return connect.Errorf(connect.Unavailable, "the machine was restored while the call waited for it")
		}
		select {
		case <-period:
		case <-ctx.Done():
			return fmt.Errorf("the machine is being captured, and the call ended first: %w", ctx.Err())
		}
	}
}
