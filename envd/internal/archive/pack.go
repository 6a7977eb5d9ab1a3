package archive

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"syscall"
)

// packEntry is one file of a packed disk: a line of JSON. Names and link targets
// are any bytes, which JSON carries as base64. After the line of a regular file
// that is neither Same nor Link come its chunks.
type packEntry struct {
	Path   []byte            `json:"path"`
	Mode   uint32            `json:"mode"`
	UID    uint32            `json:"uid"`
	GID    uint32            `json:"gid"`
	Mtime  [2]int64          `json:"mtime"`
	Size   int64             `json:"size,omitempty"`
	Mount  bool              `json:"mount,omitempty"`
	Same   uint64            `json:"same,omitempty"`
	Whole  bool              `json:"whole,omitempty"`
	Link   []byte            `json:"link,omitempty"`
	Target []byte            `json:"target,omitempty"`
	Device [2]uint32         `json:"device"`
	Xattrs map[string][]byte `json:"xattrs,omitempty"`
}

const packChunk = 64 << 10

type packer struct {
	out    *bufio.Writer
	lines  *json.Encoder
	on     Devices
	dev    uint64
	marked bool
	links  map[inode]string
	buf    []byte
}

// Devices are those of the disk: files that the image has are on Lower, those
// that were written on Upper. A file on another one is a mount point.
type Devices struct{ Lower, Upper uint64 }

// Pack writes every file of the disk whose root is at root: directories before
// what they hold, in the order of names, and an empty line at the end. Of a file that
// is as the image has it only its number is told, of such a directory nothing of
// what it holds: see unwritten. Mount points are told and not entered.
func Pack(w io.Writer, root string, on Devices) error {
	var st syscall.Stat_t
	if err := syscall.Lstat(root, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: root, Err: err}
	}
	out := bufio.NewWriterSize(w, 1<<20)
	p := &packer{
		out: out, lines: json.NewEncoder(out), on: on, dev: uint64(st.Dev), marked: inMemory(root) && inMemory(root+"/tmp"),
		links: map[inode]string{}, buf: make([]byte, packChunk),
	}
	if err := p.add(root, ""); err != nil {
		return err
	}
	if err := out.WriteByte('\n'); err != nil {
		return err
	}
	return out.Flush()
}

func (p *packer) add(path, name string) error {
	var st syscall.Stat_t
	err := syscall.Lstat(path, &st)
	if errors.Is(err, syscall.ENOENT) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	entry := packEntry{
		Path: []byte(name), Mode: st.Mode, UID: st.Uid, GID: st.Gid,
		Mtime: [2]int64{st.Mtim.Sec, st.Mtim.Nsec},
	}
	kind := st.Mode & syscall.S_IFMT
	if kind != syscall.S_IFDIR && uint64(st.Dev) == p.on.Lower {
		entry.Same = st.Ino
		return p.lines.Encode(entry)
	}
	switch kind {
	case syscall.S_IFDIR:
		entry.Mount = uint64(st.Dev) != p.dev
		entry.Whole = !entry.Mount && p.unwritten(&st)
		entry.Xattrs = packXattrs(path)
		if err := p.lines.Encode(entry); err != nil || entry.Mount || entry.Whole {
			return err
		}
		return p.children(path, name)
	case syscall.S_IFREG:
		return p.file(path, &st, entry)
	case syscall.S_IFLNK:
		target, err := os.Readlink(path)
		if err != nil {
			return err
		}
		entry.Target = []byte(target)
	case syscall.S_IFCHR, syscall.S_IFBLK:
		entry.Device = [2]uint32{uint32(st.Rdev >> 8 & 0xfff), uint32(st.Rdev&0xff | st.Rdev>>12&0xfff00)}
	case syscall.S_IFSOCK:
		return nil // nobody can use one whose listener is gone
	}
	return p.lines.Encode(entry)
}

// memoryEntry is how much an entry adds to the size of a directory in memory. The
// image's directories have other sizes, see aenv_run/erofs.py.
const memoryEntry = 20

// unwritten says that nothing in a directory, however deep, was written: then it
// is still the image's, by its size. The root and /tmp always are copies in
// memory. Where their sizes are none of that, sizes say nothing.
func (p *packer) unwritten(st *syscall.Stat_t) bool {
	return p.marked && st.Size%memoryEntry != 0
}

func inMemory(path string) bool {
	var st syscall.Stat_t
	return syscall.Lstat(path, &st) == nil && st.Size > 0 && st.Size%memoryEntry == 0
}

func (p *packer) children(path, name string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	sort.Slice(entries, func(i, j int) bool { return entries[i].Name() < entries[j].Name() })
	for _, entry := range entries {
		if err := p.add(filepath.Join(path, entry.Name()), filepath.Join(name, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) file(path string, st *syscall.Stat_t, entry packEntry) error {
	if uint64(st.Dev) != p.on.Upper {
		entry.Mount = true
		return p.lines.Encode(entry)
	}
	if st.Nlink > 1 {
		id := inode{uint64(st.Dev), st.Ino}
		if first, ok := p.links[id]; ok {
			entry.Link = []byte(first)
			return p.lines.Encode(entry)
		}
		p.links[id] = string(entry.Path)
	}
	entry.Xattrs = packXattrs(path)
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	entry.Size = st.Size
	if err := p.lines.Encode(entry); err != nil {
		return err
	}
	return p.chunks(f, st.Size)
}

// chunks writes offset, length and bytes of all that is not zero; length 0 ends.
func (p *packer) chunks(f *os.File, size int64) error {
	var head [12]byte
	for offset := int64(0); offset < size; {
		n, err := f.ReadAt(p.buf[:min(int64(len(p.buf)), size-offset)], offset)
		if n == 0 {
			return fmt.Errorf("%s became shorter while it was read: %w", f.Name(), err)
		}
		if !zero(p.buf[:n]) {
			binary.LittleEndian.PutUint64(head[:], uint64(offset))
			binary.LittleEndian.PutUint32(head[8:], uint32(n))
			if _, err := p.out.Write(head[:]); err != nil {
				return err
			}
			if _, err := p.out.Write(p.buf[:n]); err != nil {
				return err
			}
		}
		offset += int64(n)
	}
	head = [12]byte{}
	_, err := p.out.Write(head[:])
	return err
}

func zero(data []byte) bool {
	for _, one := range data {
		if one != 0 {
			return false
		}
	}
	return true
}

func packXattrs(path string) map[string][]byte {
	found := xattrs(path)
	if len(found) == 0 {
		return nil
	}
	out := map[string][]byte{}
	for name, value := range found {
		out[name[len(xattrPrefix):]] = []byte(value)
	}
	return out
}
