package boot

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// DeletedFile is a file of the disk that a process holds open and nobody can
// name any more. gVisor cannot save it.
type DeletedFile struct {
	Pid     int    `json:"pid"`
	Command string `json:"command"`
	Path    string `json:"path"`
}

const (
	deletedMark = " (deleted)"
	maxDeleted  = 64
)

// inMemory are the places whose files are saved with the memory.
var inMemory = []string{"/dev/", "/run/", "/proc/", "/memfd:"}

// ListDeleted writes one JSON object per file that is open and deleted.
func ListDeleted(w io.Writer) error {
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return err
	}
	out, seen := json.NewEncoder(w), map[string]bool{}
	for _, link := range links {
		target, err := os.Readlink(link)
		path, deleted := strings.CutSuffix(target, deletedMark)
		if err != nil || !deleted || seen[path] || isInMemory(path) {
			continue
		}
		seen[path] = true
		fields := strings.Split(link, "/")
		pid, _ := strconv.Atoi(fields[2])
		if err := out.Encode(DeletedFile{pid, readComm(fields[2]), path}); err != nil || len(seen) == maxDeleted {
			return err
		}
	}
	return nil
}

func isInMemory(path string) bool {
	for _, prefix := range inMemory {
		if strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}

func readComm(pid string) string {
	data, _ := os.ReadFile("/proc/" + pid + "/comm")
	return strings.TrimSpace(string(data))
}
