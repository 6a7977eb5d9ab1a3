package filesystem

import (
	"bytes"
	"encoding/binary"
	"os"
	"syscall"
	"unsafe"
)

// notice is one struct inotify_event.
type notice struct {
	wd           int32
	mask, cookie uint32
	name         string // "" when it is about the directory itself
}

// parseNotices reads what the kernel wrote; a cut tail is dropped.
func parseNotices(data []byte) []notice {
	var found []notice
	for len(data) >= syscall.SizeofInotifyEvent {
		size := binary.NativeEndian.Uint32(data[12:])
		if uint64(size) > uint64(len(data)-syscall.SizeofInotifyEvent) {
			break
		}
		end := syscall.SizeofInotifyEvent + int(size)
		name, _, _ := bytes.Cut(data[syscall.SizeofInotifyEvent:end], []byte{0})
		found = append(found, notice{wd: int32(binary.NativeEndian.Uint32(data)), mask: binary.NativeEndian.Uint32(data[4:]),
			cookie: binary.NativeEndian.Uint32(data[8:]), name: string(name)})
		data = data[end:]
	}
	return found
}

// inotify is one queue of the kernel.
type inotify struct {
	file *os.File
	conn syscall.RawConn
}

func openInotify() (*inotify, error) {
	fd, err := syscall.InotifyInit1(syscall.IN_CLOEXEC | syscall.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	file := os.NewFile(uintptr(fd), "inotify")
	conn, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	return &inotify{file, conn}, nil
}

func (n *inotify) close() { _ = n.file.Close() }

// read waits for notices. It ends with os.ErrClosed.
func (n *inotify) read(buf []byte) ([]notice, error) {
	size, err := n.file.Read(buf)
	if err != nil {
		return nil, err
	}
	return parseNotices(buf[:size]), nil
}

// waiting says whether more is queued at this moment.
func (n *inotify) waiting() bool {
	var size int32
	_ = n.conn.Control(func(fd uintptr) {
		const fionread = 0x541b
		_, _, _ = syscall.Syscall(syscall.SYS_IOCTL, fd, fionread, uintptr(unsafe.Pointer(&size)))
	})
	return size > 0
}

// add watches a directory; again, it gives the same number.
func (n *inotify) add(path string, mask uint32) (wd int32, err error) {
	cerr := n.conn.Control(func(fd uintptr) {
		var number int
		number, err = syscall.InotifyAddWatch(int(fd), path, mask)
		wd = int32(number)
	})
	if cerr != nil {
		return 0, cerr
	}
	return wd, err
}

func (n *inotify) remove(wd int32) {
	_ = n.conn.Control(func(fd uintptr) { _, _ = syscall.InotifyRmWatch(int(fd), uint32(wd)) })
}
