// Package filesystem serves filesystem.Filesystem of the protocol.
package filesystem

import (
	"os"
	"path/filepath"
	"syscall"
	"time"

	"aenv/envd/internal/users"
)

// Entry describes one file. Links use the encoding that every client knows:
// type SYMLINK and a target.
type Entry struct {
	Name          string  `json:"name"`
	Type          string  `json:"type"`
	Path          string  `json:"path"`
	Size          int64   `json:"size,string"`
	Mode          uint32  `json:"mode"`
	Permissions   string  `json:"permissions"`
	Owner         string  `json:"owner"`
	Group         string  `json:"group"`
	ModifiedTime  string  `json:"modifiedTime"`
	SymlinkTarget *string `json:"symlinkTarget,omitempty"`
}

func typeName(mode os.FileMode) string {
	switch {
	case mode.IsDir():
		return "FILE_TYPE_DIRECTORY"
	case mode&os.ModeSymlink != 0:
		return "FILE_TYPE_SYMLINK"
	case mode.IsRegular():
		return "FILE_TYPE_FILE"
	}
	return "FILE_TYPE_UNSPECIFIED"
}

// permissions writes a mode as ls(1) does.
func permissions(raw uint32) string {
	kinds := map[uint32]byte{syscall.S_IFDIR: 'd', syscall.S_IFLNK: 'l', syscall.S_IFCHR: 'c',
		syscall.S_IFBLK: 'b', syscall.S_IFIFO: 'p', syscall.S_IFSOCK: 's'}
	out := []byte("-rwxrwxrwx")
	if kind, ok := kinds[raw&syscall.S_IFMT]; ok {
		out[0] = kind
	}
	for i := 0; i < 9; i++ {
		if raw&(1<<(8-i)) == 0 {
			out[1+i] = '-'
		}
	}
	for _, s := range []struct {
		bit uint32
		pos int
		yes byte
		no  byte
	}{{syscall.S_ISUID, 3, 's', 'S'}, {syscall.S_ISGID, 6, 's', 'S'}, {syscall.S_ISVTX, 9, 't', 'T'}} {
		if raw&s.bit == 0 {
			continue
		}
		if out[s.pos] == 'x' {
			out[s.pos] = s.yes
		} else {
			out[s.pos] = s.no
		}
	}
	return string(out)
}

func newEntry(path string, info os.FileInfo, names *users.Names) *Entry {
	e := &Entry{
		Name:         filepath.Base(path),
		Type:         typeName(info.Mode()),
		Path:         path,
		Size:         info.Size(),
		ModifiedTime: info.ModTime().UTC().Format(time.RFC3339Nano),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Mode, e.Permissions = uint32(st.Mode)&0o7777, permissions(uint32(st.Mode))
		e.Owner, e.Group = names.User(st.Uid), names.Group(st.Gid)
	}
	if info.Mode()&os.ModeSymlink != 0 {
		if target, err := os.Readlink(path); err == nil {
			e.SymlinkTarget = &target
		}
	}
	return e
}
