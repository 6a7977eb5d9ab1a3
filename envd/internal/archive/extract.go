package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"time"

	"aenv/envd/internal/users"
)

const xattrPrefix = "SCHILY.xattr."

// Result counts what was extracted.
type Result struct {
	Entries int64 `json:"entries"`
	Bytes   int64 `json:"bytes"`
}

// BadEntry is an archive that is refused; everything else is the machine's fault.
type BadEntry struct{ err error }

func (e *BadEntry) Error() string { return e.err.Error() }
func (e *BadEntry) Unwrap() error { return e.err }

type extractor struct {
	tree   *tree
	keep   bool
	dirs   []dirMeta
	result Result
}

// dirMeta is set at the end: writing into a directory changes its time, and its
// mode may forbid writing.
type dirMeta struct {
	parts []string
	mode  uint32
	mtime time.Time
}

// Extract reads a tar stream into dir, which exists. With keep the numbers of
// the archive own the files, otherwise u does.
func Extract(r io.Reader, dir string, u *users.User, keep bool) (Result, error) {
	uid, gid := -1, -1
	if users.Privileged() {
		uid, gid = int(u.UID), int(u.GID)
		if keep {
			uid, gid = 0, 0
		}
	}
	t, err := openTree(dir, uid, gid)
	if err != nil {
		return Result{}, err
	}
	defer t.close()
	x := &extractor{tree: t, keep: keep}
	in := tar.NewReader(r)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return x.result, &BadEntry{fmt.Errorf("malformed tar stream: %w", err)}
		}
		if err := x.entry(h, in); err != nil {
			return x.result, fmt.Errorf("entry %q: %w", h.Name, err)
		}
		x.result.Entries++
	}
	return x.result, x.finishDirs()
}

func (x *extractor) entry(h *tar.Header, body io.Reader) error {
	parts, err := split(h.Name)
	if err != nil {
		return &BadEntry{err}
	}
	if len(parts) == 0 {
		if h.Typeflag == tar.TypeDir {
			return nil // the target itself keeps its mode and owner
		}
		return &BadEntry{errors.New("it has no name")}
	}
	dir, err := x.tree.parent(parts, true)
	if err != nil {
		return refused(err)
	}
	name := parts[len(parts)-1]
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		return x.file(dir, name, h, body)
	case tar.TypeDir:
		return x.directory(dir, name, parts, h)
	case tar.TypeSymlink:
		if err := clear(dir, name); err != nil {
			return err
		}
		if err := symlinkat(h.Linkname, dir, name); err != nil {
			return err
		}
		return x.finish(dir, name, h)
	case tar.TypeLink:
		return x.hardLink(parts, h)
	}
	return &BadEntry{fmt.Errorf("type %q is not supported: only files, directories and links are", h.Typeflag)}
}

// refused marks errors that the archive, not the machine, causes.
func refused(err error) error {
	if errors.Is(err, errThroughLink) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ENAMETOOLONG) {
		return &BadEntry{err}
	}
	return err
}

func (x *extractor) owner(h *tar.Header) (int, int) {
	if x.keep && users.Privileged() {
		return h.Uid, h.Gid
	}
	return x.tree.uid, x.tree.gid
}

func rawMode(h *tar.Header) uint32 { return uint32(h.Mode) & 0o7777 }

func (x *extractor) file(dir int, name string, h *tar.Header, body io.Reader) error {
	if err := clear(dir, name); err != nil {
		return &BadEntry{err}
	}
	const flags = syscall.O_WRONLY | syscall.O_CREAT | syscall.O_EXCL | syscall.O_NOFOLLOW | syscall.O_CLOEXEC
	fd, err := syscall.Openat(dir, name, flags, 0o600)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	n, err := io.Copy(fdWriter(fd), body)
	x.result.Bytes += n
	if err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return &BadEntry{err}
		}
		return err
	}
	if uid, gid := x.owner(h); uid >= 0 {
		if err := syscall.Fchown(fd, uid, gid); err != nil {
			return err
		}
	}
	if err := setXattrs(fd, h); err != nil {
		return err
	}
	// After the owner: changing it clears the setuid bit.
	if err := syscall.Fchmod(fd, rawMode(h)); err != nil {
		return err
	}
	return utimensat(dir, name, h.ModTime.UnixNano())
}

type fdWriter int

func (w fdWriter) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n, err := syscall.Write(int(w), p[done:])
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func (x *extractor) directory(dir int, name string, parts []string, h *tar.Header) error {
	fd, err := x.tree.step(dir, name, true)
	if err != nil {
		return refused(err)
	}
	defer syscall.Close(fd)
	if uid, gid := x.owner(h); uid >= 0 {
		if err := syscall.Fchown(fd, uid, gid); err != nil {
			return err
		}
	}
	if err := setXattrs(fd, h); err != nil {
		return err
	}
	x.dirs = append(x.dirs, dirMeta{parts, rawMode(h), h.ModTime})
	return nil
}

// hardLink resolves its source below the target directory like any name.
func (x *extractor) hardLink(parts []string, h *tar.Header) error {
	source, err := split(h.Linkname)
	if err != nil {
		return &BadEntry{err}
	}
	if len(source) == 0 {
		return &BadEntry{errors.New("the link has no target")}
	}
	from, err := x.tree.parent(source, false)
	if err != nil {
		return &BadEntry{fmt.Errorf("link target %q: %w", h.Linkname, err)}
	}
	// The next call of parent closes the cached descriptor.
	from, err = syscall.Dup(from)
	if err != nil {
		return err
	}
	defer syscall.Close(from)
	syscall.CloseOnExec(from)
	to, err := x.tree.parent(parts, true)
	if err != nil {
		return refused(err)
	}
	last, name := source[len(source)-1], parts[len(parts)-1]
	if strings.Join(source, "/") == strings.Join(parts, "/") {
		return nil
	}
	if mode, err := modeAt(from, last); err != nil || mode&syscall.S_IFMT == syscall.S_IFDIR {
		return &BadEntry{fmt.Errorf("link target %q is missing or a directory", h.Linkname)}
	}
	if err := clear(to, name); err != nil {
		return &BadEntry{err}
	}
	return linkat(from, last, to, name)
}

// finish sets what a symbolic link can carry.
func (x *extractor) finish(dir int, name string, h *tar.Header) error {
	uid, gid := x.owner(h)
	if err := x.tree.own(dir, name, uid, gid); err != nil {
		return err
	}
	return utimensat(dir, name, h.ModTime.UnixNano())
}

func (x *extractor) finishDirs() error {
	for i := len(x.dirs) - 1; i >= 0; i-- {
		d := x.dirs[i]
		name := d.parts[len(d.parts)-1]
		dir, err := x.tree.parent(d.parts, false)
		if err != nil {
			continue // a later entry put something else there
		}
		fd, err := syscall.Openat(dir, name, openDir, 0)
		if err != nil {
			continue
		}
		err = syscall.Fchmod(fd, d.mode)
		_ = syscall.Close(fd)
		if err == nil {
			err = utimensat(dir, name, d.mtime.UnixNano())
		}
		if err != nil {
			return fmt.Errorf("directory %q: %w", strings.Join(d.parts, "/"), err)
		}
	}
	return nil
}

// setXattrs skips what this file system or privilege cannot hold only for the
// classes that say nothing about the content.
func setXattrs(fd int, h *tar.Header) error {
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrPrefix)
		if !ok {
			continue
		}
		err := fsetxattr(fd, name, []byte(value))
		if err != nil && (strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "security.capability")) {
			return fmt.Errorf("attribute %q: %w", name, err)
		}
	}
	return nil
}
