package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
)

type inode struct{ dev, ino uint64 }

type creator struct {
	out   *tar.Writer
	links map[inode]string
	dev   uint64
}

// Create writes path and what is below it as tar, in the order of names. Names
// start with the last part of path. It stays on one file system: a mount point
// below path is an empty directory, so that / can be read without /proc.
func Create(w io.Writer, path string) error {
	path = filepath.Clean(path)
	name := filepath.Base(path)
	if path == "/" {
		name = "."
	}
	c := &creator{out: tar.NewWriter(w), links: map[inode]string{}}
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	c.dev = uint64(st.Dev)
	if err := c.add(path, name); err != nil {
		return err
	}
	return c.out.Close()
}

func (c *creator) add(path, name string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil // it went away meanwhile
	}
	if err != nil {
		return err
	}
	if info.Mode()&os.ModeSocket != 0 {
		return nil
	}
	h, err := c.header(path, name, info)
	if err != nil {
		return err
	}
	if h.Typeflag == tar.TypeReg {
		return c.file(path, h)
	}
	if err := c.out.WriteHeader(h); err != nil {
		return err
	}
	if st := info.Sys().(*syscall.Stat_t); !info.IsDir() || uint64(st.Dev) != c.dev {
		return nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	sort.Slice(entries, func(i, j int) bool { return entries[i].Name() < entries[j].Name() })
	for _, entry := range entries {
		if err := c.add(filepath.Join(path, entry.Name()), name+"/"+entry.Name()); err != nil {
			return err
		}
	}
	return nil
}

func (c *creator) header(path, name string, info os.FileInfo) (*tar.Header, error) {
	target := ""
	if info.Mode()&os.ModeSymlink != 0 {
		var err error
		if target, err = os.Readlink(path); err != nil {
			return nil, err
		}
	}
	// PAX, with names of users left out and only the modification time: the
	// stream then depends on nothing but the tree.
	h, err := tar.FileInfoHeader(anonymous{info}, target)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	h.Name, h.Format = name, tar.FormatPAX
	if info.IsDir() {
		h.Name += "/"
	}
	st := info.Sys().(*syscall.Stat_t)
	h.Uid, h.Gid = int(st.Uid), int(st.Gid)
	if info.Mode().IsRegular() && st.Nlink > 1 {
		id := inode{uint64(st.Dev), st.Ino}
		if first, ok := c.links[id]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return h, nil
		}
		c.links[id] = name
	}
	if info.Mode()&os.ModeDevice != 0 {
		h.Devmajor, h.Devminor = int64(st.Rdev>>8&0xfff), int64(st.Rdev&0xff|st.Rdev>>12&0xfff00)
	}
	if info.Mode().IsRegular() || info.IsDir() {
		h.PAXRecords = xattrs(path)
	}
	return h, nil
}

// anonymous hides the owner from archive/tar, which would look its name up.
type anonymous struct{ os.FileInfo }

func (anonymous) Sys() any { return nil }

// file opens before it writes the header: the size must be that of the content.
func (c *creator) file(path string, h *tar.Header) error {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
		h.Size = info.Size()
	}
	if err := c.out.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.Copy(c.out, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size {
		return fmt.Errorf("%s became shorter while it was read", path)
	}
	return err
}

func xattrs(path string) map[string]string {
	buf := make([]byte, 4096)
	n, err := syscall.Listxattr(path, buf)
	if err != nil || n == 0 {
		return nil
	}
	records := map[string]string{}
	for _, name := range strings.Split(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") && name != "security.capability" {
			continue
		}
		value := make([]byte, 64<<10)
		if m, err := syscall.Getxattr(path, name, value); err == nil {
			records[xattrPrefix+name] = string(value[:m])
		}
	}
	if len(records) == 0 {
		return nil
	}
	return records
}
