package identity

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
	"unsafe"
)

const (
	bootIDPath    = "/proc/sys/kernel/random/boot_id"
	machineIDPath = "/etc/machine-id"
	runDir        = "/run/aenv"
)

func derive(label string, secret []byte) []byte {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(label))
	return mac.Sum(nil)
}

const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// addEntropy credits the bytes to the pool and makes the generator use them at
// once: restored siblings would otherwise hand out identical random numbers.
func addEntropy(raw []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info := make([]byte, 8, 8+len(raw))
	binary.NativeEndian.PutUint32(info, uint32(8*len(raw)))
	binary.NativeEndian.PutUint32(info[4:], uint32(len(raw)))
	info = append(info, raw...)
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), rndAddEntropy, uintptr(unsafe.Pointer(&info[0])))
	if errno != 0 {
		// A kernel that credits nothing still mixes in what is written.
		if _, werr := f.Write(raw); werr != nil {
			return fmt.Errorf("RNDADDENTROPY: %w", errno)
		}
	}
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), rndReseedCRNG, 0); errno != 0 {
		return fmt.Errorf("RNDRESEEDCRNG: %w", errno)
	}
	return nil
}

func setClock(t time.Time) error {
	tv := syscall.NsecToTimeval(t.UnixNano())
	return syscall.Settimeofday(&tv)
}

func setHostname(name string) error {
	if err := syscall.Sethostname([]byte(name)); err != nil {
		return err
	}
	st, err := os.Lstat("/etc/hostname")
	if err != nil || !st.Mode().IsRegular() {
		return nil // an image without the file does not get one
	}
	return rewrite("/etc/hostname", name+"\n")
}

// rewrite never follows a link that the image put there.
func rewrite(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// coverFile shows other content at path without changing the file: a file in
// /run is mounted over it. On a later call the mount is there and only the file
// is rewritten.
func coverFile(path, name, text string, create bool) error {
	own := filepath.Join(runDir, name)
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(own, []byte(text), 0o444); err != nil {
		return err
	}
	st, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) && create {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o444)
		if err != nil {
			return err
		}
		f.Close()
		st, err = os.Lstat(path)
		if err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", path)
	}
	if ownStat, err := os.Lstat(own); err == nil && os.SameFile(st, ownStat) {
		return nil
	}
	return syscall.Mount(own, path, "", syscall.MS_BIND, "")
}
