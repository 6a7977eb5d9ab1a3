package process

import (
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"
)

const (
	tiocsptlck = 0x40045431
	tiocgptn   = 0x80045430
	tiocswinsz = 0x5414
)

var (
	past       = time.Unix(1, 0)
	noDeadline time.Time
)

func ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// openPTY returns both ends. The master is non-blocking so that the runtime can
// wait on it with deadlines.
func openPTY(size Size) (master, slave *os.File, err error) {
	fd, err := syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open /dev/ptmx: %w", err)
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	defer func() {
		if err != nil {
			master.Close()
		}
	}()
	var unlock, number int32
	if err = ioctl(fd, tiocsptlck, unsafe.Pointer(&unlock)); err != nil {
		return nil, nil, fmt.Errorf("unlock the terminal: %w", err)
	}
	if err = ioctl(fd, tiocgptn, unsafe.Pointer(&number)); err != nil {
		return nil, nil, fmt.Errorf("number of the terminal: %w", err)
	}
	if err = setSize(fd, size); err != nil {
		return nil, nil, fmt.Errorf("size of the terminal: %w", err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	return master, slave, nil
}

func setSize(fd int, size Size) error {
	dims := [4]uint16{clamp(uint32(size.Rows)), clamp(uint32(size.Cols))}
	return ioctl(fd, tiocswinsz, unsafe.Pointer(&dims))
}

func clamp(n uint32) uint16 {
	if n > 0xffff {
		return 0xffff
	}
	return uint16(n)
}

// resize goes through SyscallConn: File.Fd would make the master blocking.
func resize(master *os.File, size Size) error {
	conn, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var ierr error
	if err := conn.Control(func(fd uintptr) { ierr = setSize(int(fd), size) }); err != nil {
		return err
	}
	return ierr
}
