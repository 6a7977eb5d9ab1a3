package files

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"aenv/envd/internal/users"
)

const (
	maxComposeBody = 4 << 20
	maxParts       = 10_000
)

type composition struct {
	Sources     []string `json:"source_paths"`
	Destination string   `json:"destination"`
	Username    string   `json:"username"`
}

// Compose serves POST /files/compose: parts become one file, in order, and are
// gone afterwards. Until the whole is there nothing is lost: an error leaves the
// parts and what was at the destination.
func (s *Service) Compose(w http.ResponseWriter, r *http.Request) {
	written, err := s.compose(r)
	if err != nil {
		Fail(w, StatusOf(err), err.Error())
		return
	}
	body, _ := json.Marshal(written)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body)
}

func badRequest(format string, args ...any) error {
	return &httpError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

func (s *Service) compose(r *http.Request) (*Written, error) {
	body, err := Decoded(r)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(body, maxComposeBody+1))
	if err != nil {
		return nil, badRequest("cannot read the request: %v", err)
	}
	var c composition
	if err := json.Unmarshal(data, &c); err != nil || len(data) > maxComposeBody {
		return nil, badRequest("the request is not a JSON object of at most %d bytes: %v", maxComposeBody, err)
	}
	if len(c.Sources) == 0 || len(c.Sources) > maxParts || c.Destination == "" {
		return nil, badRequest("the request must name 1 to %d source_paths and a destination", maxParts)
	}
	u, err := s.settings.User(c.Username)
	if err != nil {
		return nil, err
	}
	destination, err := s.place(c.Destination, u)
	if err != nil {
		return nil, err
	}
	sources, err := s.parts(c.Sources, destination, u)
	if err != nil {
		return nil, err
	}
	if err := join(sources, destination, u); err != nil {
		return nil, err
	}
	for _, source := range sources {
		_ = os.Remove(source) // the whole is there: a part that stays is in nobody's way
	}
	return &Written{Path: destination, Name: filepath.Base(destination), Type: "file"}, nil
}

func (s *Service) place(path string, u *users.User) (string, error) {
	full, err := users.Resolve(path, u, s.settings.Workdir())
	if err != nil {
		return "", badRequest("%v", err)
	}
	return filepath.Clean(full), nil
}

// parts resolves and checks the sources before anything is written.
func (s *Service) parts(names []string, destination string, u *users.User) ([]string, error) {
	whole, _ := os.Stat(destination)
	if whole != nil && !whole.Mode().IsRegular() {
		return nil, badRequest("destination exists and is not a regular file: %s", destination)
	}
	sources := make([]string, len(names))
	for i, name := range names {
		source, err := s.place(name, u)
		if err != nil {
			return nil, err
		}
		st, err := os.Stat(source)
		switch {
		case err != nil:
			return nil, err
		case !st.Mode().IsRegular():
			return nil, badRequest("source is not a regular file: %s", source)
		case whole != nil && os.SameFile(st, whole):
			return nil, badRequest("source and destination are the same file: %s", source)
		}
		sources[i] = source
	}
	return sources, nil
}

func join(sources []string, destination string, u *users.User) error {
	if err := users.MkdirAll(filepath.Dir(destination), u, 0o755); err != nil {
		return err
	}
	whole, err := os.CreateTemp(filepath.Dir(destination), ".aenv-compose-*")
	if err != nil {
		return err
	}
	if err = copyParts(whole, sources, u); err == nil {
		err = os.Rename(whole.Name(), destination)
	}
	if err != nil {
		_ = os.Remove(whole.Name())
	}
	return err
}

func copyParts(whole *os.File, sources []string, u *users.User) (err error) {
	defer func() { err = errors.Join(err, whole.Close()) }()
	if err := whole.Chmod(0o644); err != nil {
		return err
	}
	if users.Privileged() {
		if err := whole.Chown(int(u.UID), int(u.GID)); err != nil {
			return err
		}
	}
	for _, source := range sources {
		if err := copyPart(whole, source); err != nil {
			return err
		}
	}
	return nil
}

func copyPart(whole *os.File, source string) error {
	// It may have become a FIFO since it was looked at: opening must not wait.
	part, err := os.OpenFile(source, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer part.Close()
	st, err := part.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return badRequest("source is not a regular file: %s", source)
	}
	_, err = io.Copy(whole, part) // in the kernel, where the file system can
	return err
}
