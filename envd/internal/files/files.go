// Package files serves GET and POST /files and POST /files/compose.
package files

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"syscall"

	"aenv/envd/internal/metadata"
	"aenv/envd/internal/users"
)

// Settings is what the endpoints must know of the daemon.
type Settings interface {
	User(name string) (*users.User, error)
	Workdir() string
}

// Service serves the endpoints.
type Service struct{ settings Settings }

// New makes one.
func New(settings Settings) *Service { return &Service{settings} }

// Fail answers in the error form of the plain endpoints.
func Fail(w http.ResponseWriter, status int, message string) {
	body, _ := json.Marshal(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
	// A handler may have set these for the answer that it did not give.
	for _, name := range []string{"Content-Length", "Content-Encoding", "Last-Modified", "Accept-Ranges", "ETag"} {
		w.Header().Del(name)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

type httpError struct {
	status  int
	message string
}

func (e *httpError) Error() string { return e.message }

// StatusOf maps an error to the statuses that clients know.
func StatusOf(err error) int {
	var known *httpError
	switch {
	case errors.As(err, &known):
		return known.status
	case errors.Is(err, metadata.ErrInvalid):
		return http.StatusBadRequest
	case errors.Is(err, users.ErrUnknown):
		return http.StatusUnauthorized
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return http.StatusInsufficientStorage
	case errors.Is(err, fs.ErrNotExist):
		return http.StatusNotFound
	case errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ENXIO),
		errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ELOOP):
		return http.StatusBadRequest
	case errors.Is(err, fs.ErrPermission):
		return http.StatusForbidden
	}
	return http.StatusInternalServerError
}

// Resolve finds user and path of a request.
func Resolve(s Settings, r *http.Request, path string) (string, *users.User, error) {
	u, err := s.User(r.URL.Query().Get("username"))
	if err != nil {
		return "", nil, err
	}
	full, err := users.Resolve(path, u, s.Workdir())
	if err != nil {
		return "", nil, &httpError{http.StatusBadRequest, err.Error()}
	}
	return full, u, nil
}
