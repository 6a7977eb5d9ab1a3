package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"aenv/envd/internal/files"
)

const (
	// tunnelProtocol is what the connection becomes: bytes of one TCP connection.
	tunnelProtocol = "aenv-tcp"
	maxTunnels     = 1024
	tunnelDial     = 5 * time.Second
)

// tunnels are the connections into services of the sandbox, those bound to its
// loopback too: the one port of the daemon leads to all others, whatever network
// the sandbox has. A service that a guest starts needs nothing forwarded for it.
type tunnels struct {
	mu   sync.Mutex
	live map[net.Conn]net.Conn // service -> client, nil until it is ours
}

// open serves GET /aenv/connect?port=N with Upgrade: aenv-tcp.
func (t *tunnels) open(w http.ResponseWriter, r *http.Request) {
	port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
	switch {
	case err != nil || port == 0:
		files.Fail(w, http.StatusBadRequest, "the port query is missing or not in 1 to 65535")
		return
	case !strings.EqualFold(r.Header.Get("Upgrade"), tunnelProtocol):
		w.Header().Set("Upgrade", tunnelProtocol)
		files.Fail(w, http.StatusUpgradeRequired, "this call needs Upgrade: "+tunnelProtocol)
		return
	}
	service, err := dialLoopback(int(port))
	if err != nil {
		// The words by which SDKs tell a closed port from a dead sandbox.
		files.Fail(w, http.StatusBadGateway, fmt.Sprintf("the sandbox is running but port is not open: %d: %v", port, err))
		return
	}
	defer service.Close()
	if !t.set(service, nil) {
		files.Fail(w, http.StatusServiceUnavailable, fmt.Sprintf("more than %d connections into the sandbox are open", maxTunnels))
		return
	}
	defer t.remove(service)
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		files.Fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	defer client.Close()
	t.set(service, client)
	_ = client.SetDeadline(time.Time{})
	answer := "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + tunnelProtocol + "\r\n\r\n"
	if _, err := io.WriteString(client, answer); err != nil {
		return
	}
	splice(client, buffered.Reader, service)
}

// dialLoopback tries both families: a service may be bound to one alone.
func dialLoopback(port int) (net.Conn, error) {
	var failed error
	for _, host := range []string{"127.0.0.1", "::1"} {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(host, strconv.Itoa(port)), tunnelDial)
		if err == nil {
			return conn, nil
		}
		failed = errors.Join(failed, err)
	}
	return nil, failed
}

// splice copies both ways. Each direction ends by itself: a client may have sent
// all and still wait for the answer. What breaks off on one side breaks off on
// the other: an end of file would look like the end of what was to be said.
func splice(client net.Conn, early io.Reader, service net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		pass(service, early, client)
	}()
	pass(client, service, service)
	<-done
}

// pass copies one direction, which comes from the connection "from".
func pass(to net.Conn, source io.Reader, from net.Conn) {
	if _, err := io.Copy(to, source); err != nil {
		reset(to)
		reset(from)
		return
	}
	closeWrite(to)
}

// reset ends a connection so that its peer is told.
func reset(conn net.Conn) {
	if tcp, ok := conn.(interface{ SetLinger(int) error }); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

func closeWrite(conn net.Conn) {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}

// set is false when there is no room for another.
func (t *tunnels) set(service, client net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, known := t.live[service]; !known && len(t.live) >= maxTunnels {
		return false
	}
	if t.live == nil {
		t.live = map[net.Conn]net.Conn{}
	}
	t.live[service] = client
	return true
}

func (t *tunnels) remove(conn net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.live, conn)
}

// closeAll ends every tunnel: after a restore the clients are those of another
// machine, and the services must see them go.
func (t *tunnels) closeAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for service, client := range t.live {
		_ = service.Close()
		if client != nil {
			_ = client.Close()
		}
	}
}
