// Package archive moves whole trees in and out as tar streams. Extraction
// trusts nothing: every step of every name is opened relative to the directory
// before it and never through a symbolic link.
package archive

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"unsafe"
)

const (
	openDir = syscall.O_RDONLY | syscall.O_DIRECTORY | syscall.O_NOFOLLOW | syscall.O_CLOEXEC

	atSymlinkNoFollow = 0x100
)

// tree is the directory that an archive is extracted into.
type tree struct {
	root int
	uid  int // owner of directories that are made on the way; -1 is whoever runs
	gid  int

	cachedName string // the last parent, since entries come in runs
	cachedFD   int
}

func openTree(dir string, uid, gid int) (*tree, error) {
	fd, err := syscall.Open(dir, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return &tree{root: fd, uid: uid, gid: gid, cachedFD: -1}, nil
}

func (t *tree) close() {
	t.forget()
	_ = syscall.Close(t.root)
}

func (t *tree) forget() {
	if t.cachedFD >= 0 {
		_ = syscall.Close(t.cachedFD)
		t.cachedFD = -1
	}
}

// split cleans the name of an entry. Absolute names become relative; a name
// that climbs is refused, also where it would climb back in.
func split(name string) ([]string, error) {
	if strings.ContainsRune(name, 0) {
		return nil, fmt.Errorf("entry %q: the name holds a zero byte", name)
	}
	var parts []string
	for _, part := range strings.Split(name, "/") {
		switch part {
		case "", ".":
		case "..":
			return nil, fmt.Errorf("entry %q: '..' in a name is refused", name)
		default:
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// parent opens the directory that holds the last part, making what is missing.
// The descriptor belongs to the tree and is valid until the next call.
func (t *tree) parent(parts []string, create bool) (int, error) {
	dirs := parts[:len(parts)-1]
	if len(dirs) == 0 {
		return t.root, nil
	}
	key := strings.Join(dirs, "/")
	if t.cachedFD >= 0 && t.cachedName == key {
		return t.cachedFD, nil
	}
	t.forget()
	fd := t.root
	for _, part := range dirs {
		next, err := t.step(fd, part, create)
		if fd != t.root {
			_ = syscall.Close(fd)
		}
		if err != nil {
			return -1, fmt.Errorf("directory %q: %w", part, err)
		}
		fd = next
	}
	t.cachedName, t.cachedFD = key, fd
	return fd, nil
}

var errThroughLink = errors.New("it leads through a symbolic link, which is refused")

func (t *tree) step(dir int, name string, create bool) (int, error) {
	fd, err := syscall.Openat(dir, name, openDir, 0)
	if errors.Is(err, syscall.ENOENT) && create {
		if err := syscall.Mkdirat(dir, name, 0o755); err != nil && !errors.Is(err, syscall.EEXIST) {
			return -1, err
		}
		if err := t.own(dir, name, t.uid, t.gid); err != nil {
			return -1, err
		}
		fd, err = syscall.Openat(dir, name, openDir, 0)
	}
	if errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENOTDIR) {
		if mode, serr := modeAt(dir, name); serr == nil && mode&syscall.S_IFMT == syscall.S_IFLNK {
			return -1, errThroughLink
		}
		return -1, syscall.ENOTDIR
	}
	return fd, err
}

func (t *tree) own(dir int, name string, uid, gid int) error {
	if uid < 0 {
		return nil
	}
	return syscall.Fchownat(dir, name, uid, gid, atSymlinkNoFollow)
}

// clear removes what stands where an entry goes, unless it is a directory.
func clear(dir int, name string) error {
	err := unlinkat(dir, name, 0)
	if errors.Is(err, syscall.ENOENT) {
		return nil
	}
	if errors.Is(err, syscall.EISDIR) || errors.Is(err, syscall.EPERM) {
		return errors.New("a directory is in its place")
	}
	return err
}

// modeAt is lstat relative to a directory. O_PATH opens a link itself.
func modeAt(dir int, name string) (uint32, error) {
	const oPath = 0x200000
	fd, err := syscall.Openat(dir, name, oPath|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer syscall.Close(fd)
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return 0, err
	}
	return st.Mode, nil
}

// The calls below are not in package syscall.

func check(errno syscall.Errno) error {
	if errno != 0 {
		return errno
	}
	return nil
}

func unlinkat(dir int, name string, flags int) error {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, errno := syscall.Syscall(syscall.SYS_UNLINKAT, uintptr(dir), uintptr(unsafe.Pointer(p)), uintptr(flags))
	return check(errno)
}

func symlinkat(target string, dir int, name string) error {
	t, err := syscall.BytePtrFromString(target)
	if err != nil {
		return err
	}
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, errno := syscall.Syscall(syscall.SYS_SYMLINKAT, uintptr(unsafe.Pointer(t)), uintptr(dir), uintptr(unsafe.Pointer(p)))
	return check(errno)
}

func linkat(fromDir int, from string, toDir int, to string) error {
	f, err := syscall.BytePtrFromString(from)
	if err != nil {
		return err
	}
	t, err := syscall.BytePtrFromString(to)
	if err != nil {
		return err
	}
	_, _, errno := syscall.Syscall6(syscall.SYS_LINKAT, uintptr(fromDir), uintptr(unsafe.Pointer(f)),
		uintptr(toDir), uintptr(unsafe.Pointer(t)), 0, 0)
	return check(errno)
}

func utimensat(dir int, name string, nanos int64) error {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	times := [2]syscall.Timespec{syscall.NsecToTimespec(nanos), syscall.NsecToTimespec(nanos)}
	_, _, errno := syscall.Syscall6(syscall.SYS_UTIMENSAT, uintptr(dir), uintptr(unsafe.Pointer(p)),
		uintptr(unsafe.Pointer(&times)), atSymlinkNoFollow, 0, 0)
	return check(errno)
}

func fsetxattr(fd int, name string, value []byte) error {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	var v unsafe.Pointer
	if len(value) > 0 {
		v = unsafe.Pointer(&value[0])
	}
	_, _, errno := syscall.Syscall6(syscall.SYS_FSETXATTR, uintptr(fd), uintptr(unsafe.Pointer(p)),
		uintptr(v), uintptr(len(value)), 0, 0)
	return check(errno)
}
