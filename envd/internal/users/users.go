// Package users resolves user names and paths the way the protocol defines
// them. It reads /etc/passwd and /etc/group itself: a static binary has no NSS,
// and an image may have neither file.
package users

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// maxDatabase bounds what is read of a passwd or group file of a hostile image.
const maxDatabase = 16 << 20

// ErrUnknown says that a name or number is no user here.
var ErrUnknown = errors.New("invalid username")

// User is one account.
type User struct {
	Name   string
	UID    uint32
	GID    uint32
	Groups []uint32
	Home   string
	Shell  string
}

// DB reads the account files below Root ("" is the running system).
type DB struct{ Root string }

type entry struct {
	name   string
	fields []string
}

func (db DB) read(path string, fields int) []entry {
	f, err := os.Open(db.Root + path)
	if err != nil {
		return nil
	}
	defer f.Close()
	var entries []entry
	scan := bufio.NewScanner(io.LimitReader(f, maxDatabase))
	scan.Buffer(make([]byte, 64<<10), 1<<20)
	for scan.Scan() {
		parts := strings.Split(scan.Text(), ":")
		if len(parts) >= fields && parts[0] != "" && !strings.HasPrefix(parts[0], "#") {
			entries = append(entries, entry{parts[0], parts})
		}
	}
	return entries
}

func number(text string) (uint32, bool) {
	n, err := strconv.ParseUint(text, 10, 32)
	// The highest value means "no change" to chown and setresuid.
	return uint32(n), err == nil && n != 1<<32-1
}

// Lookup finds a user by name or number, perhaps with a group: "app", "1000",
// "1000:1000", "app:staff".
func (db DB) Lookup(name string) (*User, error) {
	if name == "" || strings.ContainsAny(name, "/\n\x00") {
		return nil, fmt.Errorf("%w: %q", ErrUnknown, name)
	}
	passwd := db.read("/etc/passwd", 6)
	for _, e := range passwd {
		if e.name == name {
			return db.fromEntry(e)
		}
	}
	if name == "root" {
		return db.finish(&User{Name: "root", Home: db.rootHome()}), nil
	}
	return db.numeric(name, passwd)
}

func (db DB) fromEntry(e entry) (*User, error) {
	uid, okUID := number(e.fields[2])
	gid, okGID := number(e.fields[3])
	if !okUID || !okGID {
		return nil, fmt.Errorf("%w: the passwd entry of %q has no numeric ids", ErrUnknown, e.name)
	}
	u := &User{Name: e.name, UID: uid, GID: gid, Home: e.fields[5]}
	if len(e.fields) > 6 {
		u.Shell = e.fields[6]
	}
	if u.Home == "" {
		u.Home = "/"
	}
	return db.finish(u), nil
}

// numeric finds a user whose number is given, or whose group is: "1000",
// "1000:1000", "app:staff" (as images name them).
func (db DB) numeric(name string, passwd []entry) (*User, error) {
	userText, groupText, both := strings.Cut(name, ":")
	u, err := db.withoutGroup(userText, passwd)
	if err != nil {
		return nil, fmt.Errorf("%w: %q", ErrUnknown, name)
	}
	if !both {
		return db.finish(u), nil
	}
	gid, ok := db.group(groupText)
	if !ok {
		return nil, fmt.Errorf("%w: %q", ErrUnknown, name)
	}
	u.GID, u.Groups = gid, []uint32{gid}
	return u, nil
}

func (db DB) withoutGroup(text string, passwd []entry) (*User, error) {
	uid, isNumber := number(text)
	for _, e := range passwd {
		if n, ok := number(e.fields[2]); e.name == text || (isNumber && ok && n == uid) {
			return db.fromEntry(e)
		}
	}
	switch {
	case text == "root" || (isNumber && uid == 0):
		return &User{Name: "root", Home: db.rootHome()}, nil
	case isNumber:
		// As in a container: files of images for such users belong to group 0.
		return &User{Name: text, UID: uid, GID: 0, Home: "/"}, nil
	}
	return nil, ErrUnknown
}

func (db DB) group(text string) (uint32, bool) {
	for _, e := range db.read("/etc/group", 3) {
		if e.name == text {
			return number(e.fields[2])
		}
	}
	return number(text)
}

func (db DB) rootHome() string {
	if st, err := os.Stat(db.Root + "/root"); err == nil && st.IsDir() {
		return "/root"
	}
	return "/"
}

// finish adds the supplementary groups.
func (db DB) finish(u *User) *User {
	u.Groups = []uint32{u.GID}
	for _, e := range db.read("/etc/group", 4) {
		gid, ok := number(e.fields[2])
		if !ok || gid == u.GID {
			continue
		}
		for _, member := range strings.Split(e.fields[3], ",") {
			if member == u.Name {
				u.Groups = append(u.Groups, gid)
				break
			}
		}
	}
	return u
}

// Names maps numbers to names for listings. It reads the files once.
type Names struct{ users, groups map[uint32]string }

// Names loads both files.
func (db DB) Names() *Names {
	n := &Names{map[uint32]string{0: "root"}, map[uint32]string{0: "root"}}
	fill(n.users, db.read("/etc/passwd", 3))
	fill(n.groups, db.read("/etc/group", 3))
	return n
}

func fill(names map[uint32]string, entries []entry) {
	// The first entry of a number wins, as it does in the C library.
	for i := len(entries) - 1; i >= 0; i-- {
		if id, ok := number(entries[i].fields[2]); ok {
			names[id] = entries[i].name
		}
	}
}

func lookup(names map[uint32]string, id uint32) string {
	if name, ok := names[id]; ok {
		return name
	}
	return strconv.FormatUint(uint64(id), 10)
}

// User names a uid; the number itself when it has no name.
func (n *Names) User(uid uint32) string { return lookup(n.users, uid) }

// Group names a gid; the number itself when it has no name.
func (n *Names) Group(gid uint32) string { return lookup(n.groups, gid) }
