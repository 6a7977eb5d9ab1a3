package boot

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// names sets the host name and the files that resolvers read. None of it is
// fatal: a sandbox without a resolver is still a sandbox.
func names(o Options) {
	if err := syscall.Sethostname([]byte(hostName(o))); err != nil {
		say("host name %q: %v", hostName(o), err)
	}
	if err := mountPoint("/etc"); err != nil {
		say("/etc: %v", err)
		return
	}
	if _, err := os.Lstat("/etc/hosts"); errors.Is(err, os.ErrNotExist) {
		_ = os.WriteFile("/etc/hosts", []byte("127.0.0.1\tlocalhost\n::1\tlocalhost\n"), 0o644)
	}
	if o.DNS != "" && o.DNS != "none" {
		if err := resolver(o.DNS); err != nil {
			say("/etc/resolv.conf: %v", err)
		}
	}
}

// hostName is that of the command line, else that of the image, else one that
// every program accepts; the kernel's own is "(none)".
func hostName(o Options) string {
	if o.Hostname != "" {
		return o.Hostname
	}
	st, err := os.Lstat("/etc/hostname")
	if err == nil && st.Mode().IsRegular() && st.Size() <= 65 {
		if data, err := os.ReadFile("/etc/hostname"); err == nil && strings.TrimSpace(string(data)) != "" {
			return strings.TrimSpace(string(data))
		}
	}
	return "localhost"
}

// resolver shows our resolv.conf without changing that of the image.
func resolver(dns string) error {
	const own, target = "/run/aenv/resolv.conf", "/etc/resolv.conf"
	text := ""
	for _, server := range strings.Split(dns, ",") {
		text += "nameserver " + server + "\n"
	}
	if err := os.MkdirAll(filepath.Dir(own), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(own, []byte(text), 0o644); err != nil {
		return err
	}
	path := target
	// Many images link it into /run, where a service that does not run here
	// would have made it. The root is the image's by now: links stay inside.
	if link, err := os.Readlink(target); err == nil {
		if !filepath.IsAbs(link) {
			link = filepath.Join("/etc", link)
		}
		path = filepath.Clean(link)
	}
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		f.Close()
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return errors.New(path + " is not a regular file; it is left alone")
	}
	return syscall.Mount(own, path, "", syscall.MS_BIND, "")
}
