package server

import (
	"net"
	"net/http"
	"sync"
)

type connKey struct{}

// connections knows every open connection, so that those which a snapshot
// leaves without a peer can be closed.
type connections struct {
	mu    sync.Mutex
	state map[net.Conn]http.ConnState
}

func (c *connections) track(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state == nil {
		c.state = map[net.Conn]http.ConnState{}
	}
	if state == http.StateClosed || state == http.StateHijacked {
		delete(c.state, conn)
		return
	}
	c.state[conn] = state
}

func (c *connections) closeIf(r *http.Request, pick func(http.ConnState) bool) {
	own, _ := r.Context().Value(connKey{}).(net.Conn)
	c.mu.Lock()
	var chosen []net.Conn
	for conn, state := range c.state {
		if conn != own && pick(state) {
			chosen = append(chosen, conn)
		}
	}
	c.mu.Unlock()
	for _, conn := range chosen {
		_ = conn.Close()
	}
}

// closeIdle closes connections that carry no request at the moment.
func (c *connections) closeIdle(r *http.Request) {
	c.closeIf(r, func(s http.ConnState) bool { return s == http.StateIdle || s == http.StateNew })
}

// closeOthers closes every connection but that of the request.
func (c *connections) closeOthers(r *http.Request) {
	c.closeIf(r, func(http.ConnState) bool { return true })
}
