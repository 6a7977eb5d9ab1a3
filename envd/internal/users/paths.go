package users

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
)

// Resolve applies the path rules: "" is the working directory, "~" the home,
// relative paths start at the home, absolute ones are used untouched.
func Resolve(p string, u *User, workdir string) (string, error) {
	switch {
	case strings.ContainsRune(p, 0):
		return "", fmt.Errorf("path %q holds a zero byte", p)
	case p == "":
		if workdir == "" {
			return u.Home, nil
		}
		return Resolve(workdir, u, "")
	case p == "~":
		return u.Home, nil
	case strings.HasPrefix(p, "~/"):
		return path.Join(u.Home, p[2:]), nil
	case strings.HasPrefix(p, "~"):
		return "", fmt.Errorf("path %q: the home of another user is not supported", p)
	case strings.HasPrefix(p, "/"):
		return p, nil
	}
	return path.Join(u.Home, p), nil
}

// Privileged says whether this process may act as another user.
func Privileged() bool { return os.Geteuid() == 0 }

// Own gives a path to the user without following a link. An unprivileged
// daemon owns what it makes anyway.
func Own(p string, u *User) error {
	if !Privileged() {
		return nil
	}
	return os.Lchown(p, int(u.UID), int(u.GID))
}

// MkdirAll makes the missing directories of p, each owned by the user. What
// exists keeps its owner.
func MkdirAll(p string, u *User, mode os.FileMode) error {
	if st, err := os.Stat(p); err == nil {
		if st.IsDir() {
			return nil
		}
		return &os.PathError{Op: "mkdir", Path: p, Err: syscall.ENOTDIR}
	}
	if parent := filepath.Dir(p); parent != p {
		if err := MkdirAll(parent, u, mode); err != nil {
			return err
		}
	}
	if err := os.Mkdir(p, mode); err != nil {
		if st, serr := os.Stat(p); serr == nil && st.IsDir() {
			return nil
		}
		return err
	}
	// Past the umask: the protocol fixes the mode.
	if err := os.Chmod(p, mode); err != nil {
		return err
	}
	return Own(p, u)
}
