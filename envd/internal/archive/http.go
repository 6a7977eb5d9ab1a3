package archive

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"

	"aenv/envd/internal/files"
	"aenv/envd/internal/users"
)

// Service serves GET and PUT /aenv/archive.
type Service struct{ settings files.Settings }

// New makes one.
func New(settings files.Settings) *Service { return &Service{settings} }

// Put extracts the body.
func (s *Service) Put(w http.ResponseWriter, r *http.Request) {
	result, err := s.put(r)
	var bad *BadEntry
	switch {
	case errors.As(err, &bad):
		files.Fail(w, http.StatusBadRequest, err.Error())
	case err != nil:
		files.Fail(w, files.StatusOf(err), err.Error())
	default:
		body, _ := json.Marshal(result)
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body)
	}
}

func (s *Service) put(r *http.Request) (Result, error) {
	query := r.URL.Query()
	owner := query.Get("owner")
	switch {
	case query.Get("path") == "":
		return Result{}, &BadEntry{errors.New("the path query is missing")}
	case owner != "" && owner != "user" && owner != "keep":
		return Result{}, &BadEntry{errors.New(`owner must be "user" or "keep"`)}
	}
	path, u, err := files.Resolve(s.settings, r, query.Get("path"))
	if err != nil {
		return Result{}, err
	}
	body, err := files.Decoded(r)
	if err != nil {
		return Result{}, err
	}
	if err := users.MkdirAll(path, u, 0o755); err != nil {
		return Result{}, err
	}
	return Extract(body, path, u, owner == "keep")
}

// Get streams a file or a tree.
func (s *Service) Get(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("path") == "" {
		files.Fail(w, http.StatusBadRequest, "the path query is missing")
		return
	}
	path, _, err := files.Resolve(s.settings, r, r.URL.Query().Get("path"))
	if err == nil {
		_, err = os.Lstat(filepath.Clean(path))
	}
	if err != nil {
		files.Fail(w, files.StatusOf(err), err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/x-tar")
	if err := Create(w, path); err != nil {
		panic(http.ErrAbortHandler) // the client must see that the stream is cut
	}
}
