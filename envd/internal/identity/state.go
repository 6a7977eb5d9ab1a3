// Package identity holds what /init gives a sandbox: clock, entropy, names,
// environment, default user and access token.
package identity

import (
	"crypto/subtle"
	"encoding/base64"
	"strings"
	"sync"

	"aenv/envd/internal/connect"
	"aenv/envd/internal/users"
)

// State is the mutable configuration of the daemon. It lives in memory only, so
// it is part of a memory snapshot; /init replaces it after a restore.
type State struct {
	// HostTest makes every change of the machine a no-op.
	HostTest bool
	Users    users.DB
	// Log takes warnings.
	Log func(format string, args ...any)

	applying sync.Mutex // one /init at a time
	mu       sync.Mutex
	token    string
	user     string
	workdir  string
	env      map[string]string
	hostname string // in HostTest, what would have been set
	machine  string
	boot     string
}

// NewState starts with the given default user ("" is root).
func NewState(user string, hostTest bool, log func(string, ...any)) *State {
	if user == "" {
		user = "root"
	}
	return &State{user: user, HostTest: hostTest, Log: log, env: map[string]string{}}
}

// Env is a copy of the global environment.
func (s *State) Env() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	env := make(map[string]string, len(s.env))
	for k, v := range s.env {
		env[k] = v
	}
	return env
}

// Workdir is the default working directory, "" for the home of the user.
func (s *State) Workdir() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.workdir
}

// HasToken says whether requests must carry one.
func (s *State) HasToken() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.token != ""
}

// TokenMatches compares in constant time. It is false when no token is set.
func (s *State) TokenMatches(token string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.token != "" && subtle.ConstantTimeCompare([]byte(s.token), []byte(token)) == 1
}

// ForgetToken is half of a detach: the next /init sets a new one.
func (s *State) ForgetToken() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token = ""
}

// User finds a user by name; "" is the default one.
func (s *State) User(name string) (*users.User, error) {
	if name == "" {
		s.mu.Lock()
		name = s.user
		s.mu.Unlock()
	}
	return s.Users.Lookup(name)
}

// RPCUser finds the user of a call: Basic authorization with an empty password.
func (s *State) RPCUser(call *connect.Call) (*users.User, error) {
	name := ""
	if header := call.Header.Get("Authorization"); header != "" {
		scheme, encoded, _ := strings.Cut(header, " ")
		if !strings.EqualFold(scheme, "Basic") {
			return nil, connect.Errorf(connect.Unauthenticated, "authorization scheme %q is not supported: use Basic", scheme)
		}
		raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(encoded))
		if err != nil {
			return nil, connect.Errorf(connect.Unauthenticated, "the Basic authorization is not base64")
		}
		name = strings.TrimSuffix(string(raw), ":")
	}
	u, err := s.User(name)
	if err != nil {
		return nil, connect.Errorf(connect.Unauthenticated, "%v", err)
	}
	return u, nil
}
