package process

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"syscall"
)

const (
	kernelThread = 0x00200000 // PF_KTHREAD
	maxLooks     = 10
)

// waitExit returns when the process has ended, and leaves it to be reaped.
func waitExit(pid int) {
	const pPid, wExited, wNoWait = 1, 4, 0x01000000
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, pPid, uintptr(pid), 0, wExited|wNoWait, 0, 0)
		if errno != syscall.EINTR {
			return
		}
	}
}

// Stat is what /proc/PID/stat tells that matters here.
type Stat struct {
	Pid     int
	State   byte
	Session int
	Kernel  bool
	// Entered is a process that the host put in, which has no parent here: the
	// way in where there is no network (envd bridge).
	Entered bool
}

// readStat parses one stat file. The name field may hold anything, so fields
// are counted from its last closing bracket.
func readStat(pid int) (Stat, bool) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return Stat{}, false
	}
	return parseStat(pid, data)
}

func parseStat(pid int, data []byte) (Stat, bool) {
	i := bytes.LastIndexByte(data, ')')
	if i < 0 {
		return Stat{}, false
	}
	f := strings.Fields(string(data[i+1:]))
	if len(f) < 7 {
		return Stat{}, false
	}
	session, err := strconv.Atoi(f[3])
	if err != nil {
		return Stat{}, false
	}
	flags, _ := strconv.ParseUint(f[6], 10, 64)
	return Stat{Pid: pid, State: f[0][0], Session: session, Kernel: flags&kernelThread != 0,
		Entered: f[1] == "0" && pid != 1}, true
}

// Processes lists all processes of the machine.
func Processes() []Stat {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	var stats []Stat
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if st, ok := readStat(pid); ok {
			stats = append(stats, st)
		}
	}
	return stats
}

// KillSession kills a process, its group, and the rest of its session: an
// interactive shell puts each of its jobs in a group of its own. It looks again
// until a look finds none: one that forks may be missed by the first. A process
// dies of it also while it is frozen.
func KillSession(pid int) {
	_ = syscall.Kill(-pid, syscall.SIGKILL)
	for look, found := 0, true; found && look < maxLooks; look++ {
		found = false
		for _, st := range Processes() {
			if st.Session == pid && st.State != 'Z' && st.State != 'X' {
				_ = syscall.Kill(st.Pid, syscall.SIGKILL)
				found = true
			}
		}
	}
}
