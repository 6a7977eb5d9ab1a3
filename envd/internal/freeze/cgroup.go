package freeze

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const cgroup2Magic = 0x63677270

// cgroup is one open directory of the cgroup v2 file system. It is used by its
// descriptor: whatever the guest mounts over the path later changes nothing.
type cgroup struct{ fd int }

// openCgroup makes the directory if it is missing. Its parent exists.
func openCgroup(dir string) (*cgroup, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(filepath.Dir(dir), &st); err != nil || uint32(st.Type) != cgroup2Magic {
		return nil, fmt.Errorf("%s is not in a cgroup v2 file system", dir)
	}
	if err := syscall.Mkdir(dir, 0o755); err != nil && !errors.Is(err, syscall.EEXIST) {
		return nil, fmt.Errorf("make %s: %w", dir, err)
	}
	fd, err := syscall.Open(dir, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", dir, err)
	}
	c := &cgroup{fd}
	if _, err := c.frozen(); err != nil {
		c.close()
		return nil, fmt.Errorf("%s cannot be frozen: %w", dir, err)
	}
	return c, nil
}

func (c *cgroup) close() { _ = syscall.Close(c.fd) }

func (c *cgroup) file(name string, flags int) (int, error) {
	return syscall.Openat(c.fd, name, flags|syscall.O_CLOEXEC, 0)
}

// set asks for the state. It holds for what is in the cgroup and what comes in.
func (c *cgroup) set(frozen bool) error {
	fd, err := c.file("cgroup.freeze", syscall.O_WRONLY)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	text := "0"
	if frozen {
		text = "1"
	}
	_, err = syscall.Write(fd, []byte(text))
	return err
}

// limit bounds how many processes and threads users have, so that a kernel that
// holds maxThreads in all has reserve left for the daemon and for itself: a Go
// program that cannot start a thread ends, and with it the sandbox. The guest's
// root can lift the limit again.
func (c *cgroup) limit(maxThreads, reserve int) error {
	control, err := syscall.Openat(c.fd, "../cgroup.subtree_control", syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("cannot limit the processes of users: %w", err)
	}
	defer syscall.Close(control)
	if _, err := syscall.Write(control, []byte("+pids")); err != nil {
		return fmt.Errorf("cannot limit the processes of users, no pids controller: %w", err)
	}
	fd, err := c.file("pids.max", syscall.O_WRONLY)
	if err != nil {
		return fmt.Errorf("cannot limit the processes of users: %w", err)
	}
	defer syscall.Close(fd)
	if _, err = syscall.Write(fd, []byte(strconv.Itoa(max(maxThreads-reserve, maxThreads/2)))); err != nil {
		return fmt.Errorf("cannot limit the processes of users: %w", err)
	}
	return nil
}

// frozen says whether every process has stopped.
func (c *cgroup) frozen() (bool, error) {
	fd, err := c.file("cgroup.events", syscall.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer syscall.Close(fd)
	buf := make([]byte, 512)
	n, err := syscall.Read(fd, buf)
	if err != nil {
		return false, err
	}
	return strings.Contains("\n"+string(buf[:max(n, 0)]), "\nfrozen 1"), nil
}
