package server

import (
	"fmt"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"aenv/envd/internal/connect"
	"aenv/envd/internal/files"
	"aenv/envd/internal/process"
)

const (
	settleGrace = 500 * time.Millisecond
	settleLimit = 10 * time.Second
)

func noContent(w http.ResponseWriter) { w.WriteHeader(http.StatusNoContent) }

// flush writes all file systems out. In a host test they are not ours: one that
// hangs anywhere on the host would hang the daemon.
func (s *Server) flush() {
	if !s.state.HostTest {
		syscall.Sync()
	}
}

func (s *Server) sync(w http.ResponseWriter, _ *http.Request) {
	s.flush()
	noContent(w)
}

// detach prepares for a memory capture: the copy must hold neither the token
// nor connections that look alive, and runs no process of a user before /init.
func (s *Server) detach(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("sync") == "1" {
		s.flush()
	}
	if err := s.freezer.Freeze(); err != nil {
		s.freezer.Thaw(false)
		files.Fail(w, http.StatusInternalServerError, fmt.Sprintf("cannot freeze the processes: %v", err))
		return
	}
	// Frozen first: without a token any of them could set one.
	s.state.ForgetToken()
	s.conns.closeIdle(r)
	w.Header().Set("Connection", "close")
	noContent(w)
}

// kill kills the whole session of a process: what it started dies with it, except
// what made a session of its own.
func (s *Server) kill(w http.ResponseWriter, r *http.Request) {
	pid, err := strconv.Atoi(r.URL.Query().Get("pid"))
	switch {
	case err != nil:
		files.Fail(w, http.StatusBadRequest, "the pid query is missing or no number")
	case !s.procs.Kill(pid):
		files.Fail(w, http.StatusNotFound, fmt.Sprintf("process with pid %d not found", pid))
	default:
		noContent(w)
	}
}

// input is the body, as it is, to the standard input of a process, then its end.
func (s *Server) input(w http.ResponseWriter, r *http.Request) {
	pid, err := strconv.ParseUint(r.URL.Query().Get("pid"), 10, 31)
	if err != nil {
		files.Fail(w, http.StatusBadRequest, "the pid query is missing or no number")
		return
	}
	if err := s.procs.Feed(r.Context(), int(pid), r.Body); err != nil {
		known := connect.AsError(err)
		files.Fail(w, known.Code.HTTPStatus(), known.Message)
		return
	}
	noContent(w)
}

// settle leaves no process of a user behind.
func (s *Server) settle(w http.ResponseWriter, _ *http.Request) {
	s.freezer.Thaw(false) // a frozen one could not end as it wants to
	left := s.others()
	signalAll(left, syscall.SIGTERM)
	grace := time.Now().Add(settleGrace)
	for len(left) > 0 && time.Now().Before(grace) {
		time.Sleep(5 * time.Millisecond)
		left = s.others()
	}
	limit := time.Now().Add(settleLimit)
	for len(left) > 0 {
		if time.Now().After(limit) {
			files.Fail(w, http.StatusInternalServerError, fmt.Sprintf("processes do not end: %v", left))
			return
		}
		signalAll(left, syscall.SIGKILL)
		time.Sleep(5 * time.Millisecond)
		left = s.others()
	}
	s.flush()
	noContent(w)
}

func signalAll(pids []int, sig syscall.Signal) {
	for _, pid := range pids {
		_ = syscall.Kill(pid, sig)
	}
}

// others lists the processes that settle ends: all but the daemon, its init, the
// kernel's and those that the host put in; in a host test only those in sessions
// the daemon started.
func (s *Server) others() []int {
	ours := map[int]bool{}
	for _, pid := range s.procs.Sessions() {
		ours[pid] = true
	}
	var pids []int
	for _, st := range process.Processes() {
		if st.Pid == 1 || st.Pid == os.Getpid() || st.Kernel || st.Entered || st.State == 'Z' || st.State == 'X' {
			continue
		}
		if !s.state.HostTest || ours[st.Session] {
			pids = append(pids, st.Pid)
		}
	}
	return pids
}

type info struct {
	Version       string  `json:"version"`
	BootID        string  `json:"bootId"`
	Hostname      string  `json:"hostname"`
	MachineID     string  `json:"machineId"`
	UptimeSeconds float64 `json:"uptimeSeconds"`
	Architecture  string  `json:"architecture"`
	Kernel        string  `json:"kernel"`
	Freezes       bool    `json:"freezes"`
}

func (s *Server) info(w http.ResponseWriter, _ *http.Request) {
	out := info{Version: s.Version, UptimeSeconds: uptime(), Architecture: runtime.GOARCH, Freezes: s.freezer.Can()}
	out.BootID, out.Hostname, out.MachineID = s.state.Info()
	if release, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		out.Kernel = strings.TrimSpace(string(release))
	}
	writeJSON(w, out)
}

func uptime() float64 {
	var seconds float64
	if data, err := os.ReadFile("/proc/uptime"); err == nil {
		_, _ = fmt.Sscan(string(data), &seconds)
	}
	return seconds
}
