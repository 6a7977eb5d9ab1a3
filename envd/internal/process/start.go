package process

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"

	"aenv/envd/internal/connect"
	"aenv/envd/internal/users"
)

// DefaultPath is the PATH of a child when the daemon has none.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// environment is built in the order of the protocol: the user's own, then the
// sandbox's, then the request's; the last one wins.
func environment(u *users.User, global, request map[string]string, pty bool) []string {
	path := os.Getenv("PATH")
	if path == "" {
		path = DefaultPath
	}
	merged := map[string]string{"PATH": path, "HOME": u.Home, "USER": u.Name, "LOGNAME": u.Name}
	if pty {
		merged["TERM"] = "xterm-256color"
	}
	for _, layer := range []map[string]string{global, request} {
		for key, value := range layer {
			merged[key] = value
		}
	}
	env := make([]string, 0, len(merged))
	for key, value := range merged {
		env = append(env, key+"="+value)
	}
	sort.Strings(env)
	return env
}

func checkEnvironment(vars map[string]string) error {
	for key, value := range vars {
		if key == "" || strings.ContainsAny(key, "=\x00") || strings.ContainsRune(value, 0) {
			return connect.Errorf(connect.InvalidArgument, "environment variable %q cannot be passed on", key)
		}
	}
	return nil
}

// findExecutable searches the PATH of the child, not that of the daemon.
func findExecutable(name, cwd string, env []string) (string, error) {
	if name == "" || strings.ContainsRune(name, 0) {
		return "", connect.Errorf(connect.InvalidArgument, "process.cmd is empty or holds a zero byte")
	}
	if strings.Contains(name, "/") {
		return checkExecutable(name, cwd)
	}
	var path string
	for _, kv := range env {
		if value, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = value
		}
	}
	var unusable error // as shells: a file that may not be executed is told only if no other is found
	for _, dir := range filepath.SplitList(path) {
		found, err := checkExecutable(filepath.Join(absolute(dir, cwd), name), cwd)
		if err == nil {
			return found, nil
		}
		if st, serr := os.Stat(filepath.Join(absolute(dir, cwd), name)); unusable == nil && serr == nil && !st.IsDir() {
			unusable = err
		}
	}
	if unusable != nil {
		return "", unusable
	}
	return "", connect.Because(connect.CommandNotFound, "executable %q not found in PATH %q", name, path)
}

func absolute(p, cwd string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(cwd, p)
}

func checkExecutable(name, cwd string) (string, error) {
	full := absolute(name, cwd)
	st, err := os.Stat(full)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", connect.Because(connect.CommandNotFound, "executable %q does not exist", name)
	case err != nil:
		return "", connect.Because(connect.CommandNotExecutable, "executable %q: %v", name, err)
	case st.IsDir():
		return "", connect.Because(connect.CommandNotExecutable, "executable %q is a directory", name)
	case st.Mode()&0o111 == 0:
		return "", connect.Because(connect.CommandNotExecutable, "executable %q: permission denied", name)
	}
	return full, nil
}

// workingDirectory resolves and checks the directory to start in.
func workingDirectory(cfg *Config, u *users.User, workdir string) (string, error) {
	asked := ""
	if cfg.Cwd != nil {
		asked = *cfg.Cwd
	}
	dir, err := users.Resolve(asked, u, workdir)
	if err != nil {
		return "", connect.Errorf(connect.InvalidArgument, "%v", err)
	}
	st, err := os.Stat(dir)
	switch {
	case err == nil && st.IsDir():
		return dir, nil
	case err == nil:
		return "", connect.Because(connect.CommandNotExecutable, "cwd '%s' is not a directory", dir)
	case asked == "" && workdir == "":
		// A user whose home is missing can still run commands, as with login(1).
		return "/", nil
	case errors.Is(err, os.ErrNotExist):
		return "", connect.Because(connect.CommandNotExecutable, "cwd '%s' does not exist", dir)
	}
	return "", connect.Because(connect.CommandNotExecutable, "cwd '%s': %v", dir, err)
}

// attributes puts the process in a session and group of its own and gives it
// the user's identity.
func attributes(u *users.User, pty bool) (*syscall.SysProcAttr, error) {
	attr := &syscall.SysProcAttr{Setsid: true, Setctty: pty}
	if users.Privileged() {
		attr.Credential = &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
		return attr, nil
	}
	if int(u.UID) != os.Geteuid() {
		return nil, connect.Errorf(connect.PermissionDenied,
			"the daemon runs unprivileged as uid %d and cannot become %q", os.Geteuid(), u.Name)
	}
	return attr, nil
}

func startError(cmd string, err error) error {
	var known *connect.Error
	if errors.As(err, &known) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return err
	}
	if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EMFILE) ||
		errors.Is(err, syscall.ENFILE) {
		return connect.Errorf(connect.ResourceExhausted, "cannot start %q: %v", cmd, err)
	}
	return connect.Because(connect.CommandNotExecutable, "cannot start %q: %v", cmd, err)
}

// files are both ends of what a child is connected to.
type files struct {
	child  []*os.File // closed in the daemon once the child runs
	stdin  *os.File
	stdout *os.File
	stderr *os.File
	pty    *os.File
}

func (f *files) closeAll() {
	for _, file := range append(f.child, f.stdin, f.stdout, f.stderr, f.pty) {
		if file != nil {
			_ = file.Close()
		}
	}
}

func openTerminal(pty *PTY) (*files, error) {
	size := Size{Cols: 80, Rows: 24}
	if pty.Size != nil && pty.Size.Cols > 0 && pty.Size.Rows > 0 {
		size = *pty.Size
	}
	master, slave, err := openPTY(size)
	if err != nil {
		return nil, err
	}
	return &files{child: []*os.File{slave}, pty: master}, nil
}

func openPipes(stdin bool) (_ *files, err error) {
	f := &files{}
	defer func() {
		if err != nil {
			f.closeAll()
		}
	}()
	var in, out, errOut *os.File
	if stdin {
		in, f.stdin, err = os.Pipe()
	} else {
		in, err = os.Open(os.DevNull)
	}
	if err != nil {
		return nil, err
	}
	f.child = append(f.child, in)
	if f.stdout, out, err = os.Pipe(); err != nil {
		return nil, err
	}
	f.child = append(f.child, out)
	if f.stderr, errOut, err = os.Pipe(); err != nil {
		return nil, err
	}
	f.child = append(f.child, errOut)
	return f, nil
}

func command(path string, cfg *Config, f *files) *exec.Cmd {
	cmd := &exec.Cmd{Path: path, Args: append([]string{cfg.Cmd}, cfg.Args...)}
	if f.pty != nil {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = f.child[0], f.child[0], f.child[0]
	} else {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = f.child[0], f.child[1], f.child[2]
	}
	return cmd
}

// normalOOM undoes the protection that the daemon has and its child inherits.
func normalOOM(pid int) {
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte("0"), 0)
}
