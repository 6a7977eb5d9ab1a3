package boot

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"aenv/envd/internal/archive"
)

// devicesFile holds the numbers of the devices that files of the disk are on
// before and after they were written. It is in memory: a copy of this machine has
// it too.
const devicesFile = "/run/aenv/devices"

// rememberDevices finds these numbers out by a file of the image. On a mounted
// disk they are equal and nobody asks for them.
func rememberDevices() error {
	var before syscall.Stat_t
	if err := syscall.Lstat(KeepFile, &before); err != nil {
		return err
	}
	f, err := os.OpenFile(KeepFile, os.O_RDWR|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	var st syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	return os.WriteFile(devicesFile, fmt.Appendf(nil, "%d %d", before.Dev, st.Dev), 0o600)
}

// PackDisk writes what the disk holds now: see archive.Pack.
func PackDisk(w io.Writer) error {
	text, err := os.ReadFile(devicesFile)
	if err != nil {
		return err
	}
	var on archive.Devices
	if _, err := fmt.Sscan(string(text), &on.Lower, &on.Upper); err != nil {
		return fmt.Errorf("%s: %w", devicesFile, err)
	}
	return archive.Pack(w, "/", on)
}

// ListStopped writes the ids of processes that somebody stopped, a line each.
func ListStopped(w io.Writer) error {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return err
	}
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, rest, ok := strings.Cut(string(data[max(0, strings.LastIndexByte(string(data), ')')):]), ") ")
		if ok && strings.HasPrefix(rest, "T") {
			if _, err := fmt.Fprintln(w, strings.Split(path, "/")[2]); err != nil {
				return err
			}
		}
	}
	return nil
}
