package server

import (
	"bufio"
	"bytes"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

type metrics struct {
	TS          int64   `json:"ts"`
	CPUCount    int     `json:"cpu_count"`
	CPUUsedPct  float64 `json:"cpu_used_pct"`
	MemTotal    uint64  `json:"mem_total"`
	MemUsed     uint64  `json:"mem_used"`
	MemCache    uint64  `json:"mem_cache"`
	MemTotalMiB uint64  `json:"mem_total_mib"`
	MemUsedMiB  uint64  `json:"mem_used_mib"`
	DiskUsed    uint64  `json:"disk_used"`
	DiskTotal   uint64  `json:"disk_total"`
}

func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) {
	m := metrics{TS: time.Now().Unix(), CPUCount: runtime.NumCPU(), CPUUsedPct: s.cpu.used()}
	mem := meminfo()
	m.MemTotal = mem["MemTotal"]
	m.MemCache = mem["Cached"]
	m.MemUsed = m.MemTotal - min(m.MemTotal, mem["MemAvailable"])
	m.MemTotalMiB, m.MemUsedMiB = m.MemTotal>>20, m.MemUsed>>20
	var st syscall.Statfs_t
	if syscall.Statfs("/", &st) == nil {
		m.DiskTotal = st.Blocks * uint64(st.Bsize)
		m.DiskUsed = (st.Blocks - st.Bfree) * uint64(st.Bsize)
	}
	writeJSON(w, m)
}

func meminfo() map[string]uint64 {
	values := map[string]uint64{}
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return values
	}
	scan := bufio.NewScanner(bytes.NewReader(data))
	for scan.Scan() {
		f := strings.Fields(scan.Text())
		if len(f) < 2 {
			continue
		}
		if kib, err := strconv.ParseUint(f[1], 10, 64); err == nil {
			values[strings.TrimSuffix(f[0], ":")] = kib << 10
		}
	}
	return values
}

// cpuSample turns the counters of the kernel into a share since the last call;
// the first call tells the share since boot.
type cpuSample struct {
	mu          sync.Mutex
	busy, total uint64
	last        float64
}

func (c *cpuSample) used() float64 {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(data), "\n")
	f := strings.Fields(line)
	var total, idle uint64
	for i, text := range f[min(1, len(f)):] {
		if i >= 8 {
			break // guest time is counted in user time already
		}
		n, _ := strconv.ParseUint(text, 10, 64)
		total += n
		if i == 3 || i == 4 {
			idle += n
		}
	}
	busy := total - idle
	c.mu.Lock()
	defer c.mu.Unlock()
	// Counters may run back after a restore.
	if total > c.total && busy >= c.busy {
		c.last = 100 * float64(busy-c.busy) / float64(total-c.total)
	}
	c.busy, c.total = busy, total
	return float64(int(c.last*100)) / 100
}
