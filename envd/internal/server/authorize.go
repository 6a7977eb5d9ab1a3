package server

import (
	"errors"
	"net/http"
	"strings"
	"time"

	"aenv/envd/internal/connect"
	"aenv/envd/internal/files"
	"aenv/envd/internal/identity"
)

func isRPC(path string) bool {
	return strings.HasPrefix(path, "/process.Process/") || strings.HasPrefix(path, "/filesystem.Filesystem/")
}

// authorize demands the token once one is set. /health and /init are open:
// /init compares the token itself. A file may also be read or written by a
// signature, which a browser can carry in its URL.
func (s *Server) authorize(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		open := r.URL.Path == "/health" || r.URL.Path == "/init"
		if open || !s.state.HasToken() {
			next.ServeHTTP(w, r)
			return
		}
		token := r.Header.Get("X-Access-Token")
		status, message := http.StatusUnauthorized, "the access token is wrong"
		switch {
		case token != "" && s.state.TokenMatches(token):
			next.ServeHTTP(w, r)
			return
		case token != "":
		case r.URL.Path == "/files":
			err := s.state.CheckSignature(signed(r), time.Now())
			if err == nil {
				next.ServeHTTP(w, r)
				return
			}
			if message = err.Error(); errors.Is(err, identity.ErrNoExpiration) {
				status = http.StatusBadRequest
			}
		default:
			message = "the X-Access-Token header is missing"
		}
		if isRPC(r.URL.Path) {
			connect.WriteError(w, connect.Errorf(connect.Unauthenticated, "%s", message))
			return
		}
		files.Fail(w, status, message)
	})
}

func signed(r *http.Request) identity.Signed {
	query := r.URL.Query()
	operation := "read"
	if r.Method == http.MethodPost {
		operation = "write"
	}
	return identity.Signed{Path: query.Get("path"), Operation: operation, User: query.Get("username"),
		Expiration: query.Get("signature_expiration"), Signature: query.Get("signature")}
}

// cors lets browsers in: the token, not the origin, is what protects.
func cors(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Origin") == "" {
			next.ServeHTTP(w, r)
			return
		}
		h := w.Header()
		h.Set("Access-Control-Allow-Origin", "*")
		h.Set("Access-Control-Expose-Headers",
			"Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin, Location, Cache-Control, X-Content-Type-Options")
		if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
			h.Set("Access-Control-Allow-Methods", "GET, POST, PUT, DELETE, HEAD, PATCH")
			h.Set("Access-Control-Allow-Headers", r.Header.Get("Access-Control-Request-Headers"))
			h.Set("Access-Control-Max-Age", "7200")
			w.WriteHeader(http.StatusNoContent)
			return
		}
		next.ServeHTTP(w, r)
	})
}
