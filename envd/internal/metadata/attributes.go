package metadata

import (
	"bytes"
	"strings"
	"syscall"
	"unsafe"
)

// The calls that the standard library lacks: those that do not follow a link,
// and those on an open file.

// read calls twice: for the size, then for the data.
func read(limit int, call func(buf *byte, size int) (int, error)) ([]byte, error) {
	for try := 0; ; try++ {
		size, err := call(nil, 0)
		if err != nil || size == 0 {
			return nil, err
		}
		if size > limit {
			return nil, syscall.E2BIG
		}
		buf := make([]byte, size)
		n, err := call(&buf[0], size)
		if err == syscall.ERANGE && try < 3 {
			continue // it grew meanwhile
		}
		if err != nil {
			return nil, err
		}
		return buf[:n], nil
	}
}

func names(data []byte, err error) ([]string, error) {
	if err != nil || len(data) == 0 {
		return nil, err
	}
	return strings.Split(string(bytes.TrimRight(data, "\x00")), "\x00"), nil
}

func result(n uintptr, errno syscall.Errno) (int, error) {
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

func list(path string) ([]string, error) {
	p, err := syscall.BytePtrFromString(path)
	if err != nil {
		return nil, err
	}
	return names(read(maxNames, func(buf *byte, size int) (int, error) {
		n, _, errno := syscall.Syscall(syscall.SYS_LLISTXATTR, uintptr(unsafe.Pointer(p)),
			uintptr(unsafe.Pointer(buf)), uintptr(size))
		return result(n, errno)
	}))
}

func get(path, name string) (string, error) {
	p, err := syscall.BytePtrFromString(path)
	if err != nil {
		return "", err
	}
	attribute, err := syscall.BytePtrFromString(name)
	if err != nil {
		return "", err
	}
	data, err := read(maxValue, func(buf *byte, size int) (int, error) {
		n, _, errno := syscall.Syscall6(syscall.SYS_LGETXATTR, uintptr(unsafe.Pointer(p)),
			uintptr(unsafe.Pointer(attribute)), uintptr(unsafe.Pointer(buf)), uintptr(size), 0, 0)
		return result(n, errno)
	})
	return string(data), err
}

func listFd(fd int) ([]string, error) {
	return names(read(maxNames, func(buf *byte, size int) (int, error) {
		n, _, errno := syscall.Syscall(syscall.SYS_FLISTXATTR, uintptr(fd), uintptr(unsafe.Pointer(buf)), uintptr(size))
		return result(n, errno)
	}))
}

func setFd(fd int, name, value string) error {
	attribute, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	data := append([]byte(value), 0) // never empty: it has an address
	_, _, errno := syscall.Syscall6(syscall.SYS_FSETXATTR, uintptr(fd), uintptr(unsafe.Pointer(attribute)),
		uintptr(unsafe.Pointer(&data[0])), uintptr(len(value)), 0, 0)
	_, err = result(0, errno)
	return err
}

func removeFd(fd int, name string) error {
	attribute, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, errno := syscall.Syscall(syscall.SYS_FREMOVEXATTR, uintptr(fd), uintptr(unsafe.Pointer(attribute)), 0)
	_, err = result(0, errno)
	return err
}
