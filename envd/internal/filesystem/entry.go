// Package filesystem serves filesystem.Filesystem of the protocol.
package filesystem

import (
	"os"
	"path/filepath"
	"syscall"

	"aenv/envd/internal/connect"
	"aenv/envd/internal/metadata"
	"aenv/envd/internal/users"
)

// Entry describes one file. Links use the encoding that both current SDKs show,
// type SYMLINK and a target, and say so in the newer one too.
type Entry struct {
	Name          string            `json:"name" pb:"1"`
	Type          FileType          `json:"type" pb:"2"`
	Path          string            `json:"path" pb:"3"`
	Size          int64             `json:"size,string" pb:"4"`
	Mode          uint32            `json:"mode" pb:"5"`
	Permissions   string            `json:"permissions" pb:"6"`
	Owner         string            `json:"owner" pb:"7"`
	Group         string            `json:"group" pb:"8"`
	ModifiedTime  connect.Timestamp `json:"modifiedTime" pb:"9"`
	SymlinkTarget *string           `json:"symlinkTarget,omitempty" pb:"10"`
	Metadata      map[string]string `json:"metadata,omitempty" pb:"11"`
	IsSymlink     bool              `json:"isSymlink,omitempty" pb:"12"`
}

func typeOf(mode os.FileMode) FileType {
	switch {
	case mode.IsDir():
		return TypeDirectory
	case mode&os.ModeSymlink != 0:
		return TypeSymlink
	case mode.IsRegular():
		return TypeFile
	}
	return TypeUnspecified
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

// maxMetadata bounds what one reply says of the metadata of its entries.
const maxMetadata = 16 << 20

// describer makes the entries of one reply.
type describer struct {
	names    *users.Names
	metadata int
}

func (s *Service) describer() *describer { return &describer{names: s.db.Names()} }

func (d *describer) entry(path string, info os.FileInfo) (*Entry, error) {
	e := &Entry{
		Name:         filepath.Base(path),
		Type:         typeOf(info.Mode()),
		Path:         path,
		Size:         info.Size(),
		ModifiedTime: connect.NewTimestamp(info.ModTime()),
		IsSymlink:    info.Mode()&os.ModeSymlink != 0,
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Mode, e.Permissions = uint32(st.Mode)&0o7777, permissions(uint32(st.Mode))
		e.Owner, e.Group = d.names.User(st.Uid), d.names.Group(st.Gid)
	}
	if e.IsSymlink {
		if target, err := os.Readlink(path); err == nil {
			e.SymlinkTarget = &target
		}
	}
	if e.Type == TypeFile || e.Type == TypeDirectory {
		e.Metadata = metadata.Of(path)
	}
	for key, value := range e.Metadata {
		d.metadata += len(key) + len(value)
	}
	if d.metadata > maxMetadata {
		return nil, connect.TooLargef("the metadata of the entries is over %d bytes: ask for fewer entries", maxMetadata)
	}
	return e, nil
}
