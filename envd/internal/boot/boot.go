// Package boot is the first process of a sandbox: from an initramfs it loads the
// modules, mounts the disk, sets up the network, changes the root and starts the
// daemon. After that it only reaps.
package boot

import (
	"fmt"
	"os"
	"sort"
	"strings"
	"syscall"
	"time"
)

// Options come from the kernel command line.
type Options struct {
	Root     string
	IP       string
	Gateway  string
	DNS      string
	Hostname string
}

// ParseOptions reads the words that are ours; the rest is the kernel's.
func ParseOptions(cmdline string) Options {
	o := Options{Root: "/dev/vda", IP: "10.0.2.15/24", Gateway: "10.0.2.2", DNS: "10.0.2.3"}
	fields := map[string]*string{"aenv.root": &o.Root, "aenv.ip": &o.IP, "aenv.gw": &o.Gateway,
		"aenv.dns": &o.DNS, "aenv.hostname": &o.Hostname}
	for _, word := range strings.Fields(cmdline) {
		key, value, found := strings.Cut(word, "=")
		if field, ours := fields[key]; ours && found {
			*field = value
		}
	}
	return o
}

var console = os.Stderr

func say(format string, args ...any) { fmt.Fprintf(console, "aenv-init: "+format+"\n", args...) }

// failure is a fatal error with the step that failed.
type failure struct {
	what string
	why  error
}

func (f *failure) Error() string { return f.what + ": " + f.why.Error() }

func fail(what string, why error) error {
	if why == nil {
		return nil
	}
	return &failure{what, why}
}

// Main never returns: the machine ends with it.
func Main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "envd init: must be the first process of a machine")
		os.Exit(2)
	}
	// Before /dev is there the kernel gave us the console as descriptors, or nothing.
	_ = os.Setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	syscall.Umask(0o022)
	if err := bring(); err != nil {
		say("FAILED: %v", err)
		powerOff()
	}
	code := Supervise([]string{"serve", "--console", "--cgroup", cgroups + "/user"})
	say("the daemon ended with code %d; the machine ends", code)
	powerOff()
}

// bring takes the machine from the initramfs to a root in which the daemon runs.
func bring() error {
	if err := early(); err != nil {
		return err
	}
	data, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return fail("read /proc/cmdline", err)
	}
	o := ParseOptions(string(data))
	loadModules("/modules")
	if err := waitFor(o.Root, 10*time.Second); err != nil {
		return fail("root device", err)
	}
	if err := mountRoot(o.Root); err != nil {
		return err
	}
	if err := switchRoot(); err != nil {
		return err
	}
	if err := populate(); err != nil {
		return err
	}
	network(o)
	names(o)
	_ = os.WriteFile("/proc/sys/kernel/printk", []byte("1 4 1 7"), 0)
	return nil
}

// early mounts what the steps before the real root need.
func early() error {
	for _, m := range []struct{ target, kind string }{
		{"/proc", "proc"}, {"/sys", "sysfs"}, {"/dev", "devtmpfs"},
	} {
		_ = os.MkdirAll(m.target, 0o755)
		err := syscall.Mount(m.kind, m.target, m.kind, 0, "")
		if err != nil && err != syscall.EBUSY {
			return fail("mount "+m.target, err)
		}
	}
	if f, err := os.OpenFile("/dev/console", os.O_RDWR|syscall.O_NOCTTY, 0); err == nil {
		console = f
		for fd := 0; fd <= 2; fd++ {
			_ = syscall.Dup3(int(f.Fd()), fd, 0)
		}
	}
	return nil
}

// loadModules loads all files of a directory in the order of their names. A
// module that fails is reported, not fatal: whether it is missed shows later.
func loadModules(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	sort.Slice(entries, func(i, j int) bool { return entries[i].Name() < entries[j].Name() })
	for _, entry := range entries {
		path := dir + "/" + entry.Name()
		if !strings.HasSuffix(path, ".ko") {
			continue
		}
		if err := loadModule(path); err != nil && err != syscall.EEXIST {
			say("module %s: %v", entry.Name(), err)
		}
	}
	// The initramfs stays in memory; its modules need not.
	_ = os.RemoveAll(dir)
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	empty, _ := syscall.BytePtrFromString("")
	return finitModule(f, empty)
}

// waitFor polls: modules probe their devices after they are loaded.
func waitFor(path string, limit time.Duration) error {
	for end := time.Now().Add(limit); ; time.Sleep(2 * time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s did not appear within %v", path, limit)
		}
	}
}

func powerOff() {
	syscall.Sync()
	// The console may be slow; the host reads its last line.
	time.Sleep(50 * time.Millisecond)
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
	for {
		time.Sleep(time.Hour)
	}
}
