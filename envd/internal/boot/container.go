package boot

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"
)

// KeepFile is what the driver leaves in /tmp before the sandbox starts: gVisor
// covers an empty /tmp by a memory file system, whose files would not be on the
// disk.
const KeepFile = "/tmp/.aenv-keep"

// Container prepares the root of a container in which everything is mounted
// already, then runs the daemon and reaps. It returns the daemon's exit code.
func Container(dns string) int {
	syscall.Umask(0o022)
	if err := rememberDevices(); err != nil {
		say("device of the disk: %v", err)
	}
	_ = os.Remove(KeepFile)
	if err := os.Chmod("/tmp", 0o777|os.ModeSticky); err != nil {
		say("mode of /tmp: %v", err)
	}
	// Whoever writes to the console means the first process's output.
	_ = os.Symlink("/proc/1/fd/1", "/dev/console")
	names(Options{DNS: dns})
	return Supervise([]string{"serve"})
}

const (
	bridgeWait = 5 * time.Second
	bridgePoll = 5 * time.Millisecond
)

// Bridge copies standard input and output to and from a TCP port of this
// machine: the way in where the host has no network to the sandbox.
func Bridge(port int) error {
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	conn, err := net.Dial("tcp", address)
	for end := time.Now().Add(bridgeWait); err != nil && time.Now().Before(end); {
		time.Sleep(bridgePoll) // the daemon may be starting
		conn, err = net.Dial("tcp", address)
	}
	if err != nil {
		return fmt.Errorf("bridge: %w", err)
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, os.Stdin)
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.CloseWrite()
		}
	}()
	_, _ = io.Copy(os.Stdout, conn)
	return nil // the peer is done; what the client would still send has no reader
}
