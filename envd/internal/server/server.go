// Package server is the HTTP face of the daemon: routing, the token rule, and
// the small endpoints that belong to no other package.
package server

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"time"

	"aenv/envd/internal/archive"
	"aenv/envd/internal/connect"
	"aenv/envd/internal/files"
	"aenv/envd/internal/filesystem"
	"aenv/envd/internal/freeze"
	"aenv/envd/internal/identity"
	"aenv/envd/internal/process"
)

// Server ties the parts together.
type Server struct {
	Version string
	state   *identity.State
	procs   *process.Manager
	freezer *freeze.Freezer
	conns   connections
	tunnels tunnels
	cpu     cpuSample
	started time.Time
	http    *http.Server
}

// New builds the routes.
func New(version string, state *identity.State, freezer *freeze.Freezer) *Server {
	s := &Server{Version: version, state: state, procs: process.NewManager(state, freezer), freezer: freezer,
		started: time.Now()}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", s.health)
	mux.HandleFunc("POST /init", s.init)
	mux.HandleFunc("GET /metrics", s.metrics)
	mux.HandleFunc("GET /envs", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, state.Env()) })
	fileService := files.New(state)
	mux.HandleFunc("GET /files", fileService.Download)
	mux.HandleFunc("POST /files", upload(fileService.Upload))
	mux.HandleFunc("POST /files/compose", fileService.Compose)
	rpc(mux, "process.Process", s.procs.Handlers())
	rpc(mux, "filesystem.Filesystem", filesystem.New(state, state.Users).Handlers())
	mux.HandleFunc("POST /aenv/sync", s.sync)
	mux.HandleFunc("POST /aenv/settle", s.settle)
	mux.HandleFunc("POST /aenv/detach", s.detach)
	mux.HandleFunc("POST /aenv/kill", s.kill)
	mux.HandleFunc("PUT /aenv/input", upload(s.input))
	mux.HandleFunc("GET /aenv/info", s.info)
	mux.HandleFunc("GET /aenv/connect", s.tunnels.open)
	archives := archive.New(state)
	mux.HandleFunc("PUT /aenv/archive", upload(archives.Put))
	mux.HandleFunc("GET /aenv/archive", archives.Get)
	s.http = &http.Server{
		Handler:           cors(s.authorize(mux)),
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       10 * time.Minute,
		MaxHeaderBytes:    256 << 10,
		ConnState:         s.conns.track,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}
	return s
}

// rpc routes the methods of one service; an unknown method is a Connect error.
func rpc(mux *http.ServeMux, service string, handlers map[string]http.Handler) {
	for name, handler := range handlers {
		mux.Handle("POST /"+service+"/"+name, handler)
	}
	mux.HandleFunc("POST /"+service+"/", func(w http.ResponseWriter, r *http.Request) {
		connect.WriteError(w, connect.Errorf(connect.Unimplemented, "unknown method %s", r.URL.Path))
	})
}

// Serve answers until the listener closes.
func (s *Server) Serve(l net.Listener) error {
	err := s.http.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends the server and everything it started.
func (s *Server) Close() {
	s.procs.KillAll() // first: Serve returns as soon as the server closes
	_ = s.http.Close()
}

func writeJSON(w http.ResponseWriter, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		files.Fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(body)
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) init(w http.ResponseWriter, r *http.Request) {
	req, err := identity.ParseRequest(r.Body)
	if err == nil {
		err = s.state.Apply(req)
	}
	var known *identity.HTTPError
	switch {
	case errors.As(err, &known):
		files.Fail(w, known.Status, known.Message)
		return
	case err != nil:
		files.Fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	if req.Restored {
		s.conns.closeOthers(r)
		s.tunnels.closeAll()
	}
	// Last: everything that tells this machine from its copies is set.
	s.freezer.Thaw(req.Restored)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}
