package freeze

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func TestWithoutCgroupsItSaysSoAndGoesOn(t *testing.T) {
	dir, logged := filepath.Join(t.TempDir(), "user"), 0
	f := Open(dir, func(string, ...any) { logged++ })
	if f.Can() || logged != 1 {
		t.Errorf("can %v, logged %d", f.Can(), logged)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory was made: %v", err)
	}
	attr, ran := &syscall.SysProcAttr{}, false
	if err := f.Freeze(); err != nil {
		t.Error(err)
	}
	if err := f.Start(context.Background(), attr, func() error { ran = true; return nil }); err != nil || !ran || attr.UseCgroupFD {
		t.Errorf("%v %v %+v", err, ran, attr)
	}
	f.Thaw(true)
}

// frozen is one whose cgroup answers to nothing: what is tested is who waits.
func frozen(t *testing.T) *Freezer {
	fd, err := syscall.Open(t.TempDir(), syscall.O_RDONLY|syscall.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	return &Freezer{Log: t.Logf, tick: time.Microsecond, group: &cgroup{fd}, period: make(chan struct{})}
}

func TestAStartWaitsForTheThaw(t *testing.T) {
	for _, restored := range []bool{false, true} {
		f, done := frozen(t), make(chan error, 1)
		go func() { done <- f.Start(context.Background(), &syscall.SysProcAttr{}, func() error { return nil }) }()
		select {
		case err := <-done:
			t.Fatalf("it did not wait: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
		f.Thaw(restored)
		if err := <-done; (err != nil) != restored {
			t.Errorf("restored %v: %v", restored, err)
		}
	}
}

func TestAStartThatIsGivenUpIsNotDone(t *testing.T) {
	f := frozen(t)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := f.Start(ctx, &syscall.SysProcAttr{}, func() error { t.Error("started"); return nil }); err == nil {
		t.Error("no error")
	}
}

func TestAloneItThawsByItself(t *testing.T) {
	f := frozen(t)
	go f.alone(f.period)
	if err := f.Start(context.Background(), &syscall.SysProcAttr{}, func() error { return nil }); err != nil {
		t.Error(err)
	}
}
