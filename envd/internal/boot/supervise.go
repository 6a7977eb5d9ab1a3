package boot

import (
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Supervise runs this binary again with args and reaps every orphan until that
// child ends. It returns the child's exit code, 128 + n for a signal.
func Supervise(args []string) int {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM, syscall.SIGINT)
	signal.Ignore(syscall.SIGHUP)
	daemon, err := syscall.ForkExec("/proc/self/exe", append([]string{"envd"}, args...), &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		say("FAILED: start the daemon: %v", err)
		return 127
	}
	go func() {
		<-term
		syscall.Sync()
		// The daemon ends what it started and then itself; its end is ours.
		_ = syscall.Kill(daemon, syscall.SIGTERM)
		time.Sleep(5 * time.Second)
		_ = syscall.Kill(daemon, syscall.SIGKILL)
	}()
	return reap(daemon)
}

func reap(daemon int) int {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return 126 // no child is left, so the daemon is not either
		case pid != daemon:
			continue
		case status.Signaled():
			return 128 + int(status.Signal())
		default:
			return status.ExitStatus()
		}
	}
}
