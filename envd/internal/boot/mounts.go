package boot

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"unsafe"
)

func finitModule(f *os.File, params *byte) error {
	_, _, errno := syscall.Syscall(sysFinitModule, f.Fd(), uintptr(unsafe.Pointer(params)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

const newRoot = "/sysroot"

func mountRoot(device string) error {
	if err := os.MkdirAll(newRoot, 0o755); err != nil {
		return fail("make "+newRoot, err)
	}
	// The node may still be probing the device when its node appears.
	return fail("mount "+device, syscall.Mount(device, newRoot, "ext4", syscall.MS_NOATIME, ""))
}

// switchRoot makes the disk the root. The initramfs stays mounted below it, so
// /proc/self/exe still names this binary.
func switchRoot() error {
	// Moved rather than mounted again: open files of the console stay valid.
	for _, dir := range []string{"/dev", "/sys", "/proc"} {
		if err := mountPoint(newRoot + dir); err != nil {
			return fail("mount point "+dir, err)
		}
		if err := syscall.Mount(dir, newRoot+dir, "", syscall.MS_MOVE, ""); err != nil {
			return fail("move "+dir, err)
		}
	}
	if err := os.Chdir(newRoot); err != nil {
		return fail("enter the root", err)
	}
	if err := syscall.Mount(".", "/", "", syscall.MS_MOVE, ""); err != nil {
		return fail("move the root", err)
	}
	if err := syscall.Chroot("."); err != nil {
		return fail("change the root", err)
	}
	return fail("enter the root", os.Chdir("/"))
}

// mountPoint makes sure that path is a directory and no link. An image can put
// anything there: following a link would mount over another part of it.
func mountPoint(path string) error {
	st, err := os.Lstat(path)
	switch {
	case err == nil && st.IsDir():
		return nil
	case err == nil:
		say("%s of the image is not a directory (%s); it is replaced by one", path, st.Mode())
		if err := os.Remove(path); err != nil {
			return err
		}
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	return os.Mkdir(path, 0o755)
}

// cgroups is where cgroup v2 is mounted.
const cgroups = "/sys/fs/cgroup"

type mount struct {
	kind, target string
	flags        uintptr
	data         string
	needed       bool
}

// populate mounts the rest inside the new root.
func populate() error {
	const plain = syscall.MS_NOSUID | syscall.MS_NODEV
	for _, m := range []mount{
		{"tmpfs", "/run", plain, "mode=0755", true},
		{"devpts", "/dev/pts", syscall.MS_NOSUID | syscall.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666", true},
		{"tmpfs", "/dev/shm", plain, "mode=1777", true},
		{"mqueue", "/dev/mqueue", plain | syscall.MS_NOEXEC, "", false},
		{"cgroup2", cgroups, plain | syscall.MS_NOEXEC, "", false},
	} {
		err := m.do()
		if err != nil && m.needed {
			return fail("mount "+m.target, err)
		}
	}
	devices()
	if err := mountPoint("/tmp"); err != nil {
		return fail("make /tmp", err)
	}
	return fail("mode of /tmp", os.Chmod("/tmp", 0o777|os.ModeSticky))
}

func (m mount) do() error {
	if filepath.Dir(m.target) != "/sys/fs" { // sysfs has its own directories
		if err := mountPoint(m.target); err != nil {
			return err
		}
	}
	return syscall.Mount(m.kind, m.target, m.kind, m.flags, m.data)
}

// devices adds what user space expects in /dev beside the kernel's nodes.
func devices() {
	_ = os.Remove("/dev/ptmx")
	if os.Symlink("pts/ptmx", "/dev/ptmx") != nil {
		say("/dev/ptmx cannot be linked to /dev/pts/ptmx")
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		_ = os.Symlink(target, "/dev/"+name)
	}
}
