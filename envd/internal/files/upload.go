package files

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"aenv/envd/internal/users"
)

// Written describes one uploaded file.
type Written struct {
	Path string `json:"path"`
	Name string `json:"name"`
	Type string `json:"type"`
}

// Upload serves POST /files.
func (s *Service) Upload(w http.ResponseWriter, r *http.Request) {
	written, err := s.upload(r)
	if err != nil {
		Fail(w, StatusOf(err), err.Error())
		return
	}
	body, _ := json.Marshal(written)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body)
}

func (s *Service) upload(r *http.Request) ([]Written, error) {
	for name := range r.Header {
		if strings.HasPrefix(name, "X-Metadata-") {
			return nil, &httpError{http.StatusNotImplemented, "file metadata (" + name + ") is not supported yet"}
		}
	}
	media, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, &httpError{http.StatusBadRequest, "the Content-Type is missing or malformed"}
	}
	body, err := Decoded(r)
	if err != nil {
		return nil, err
	}
	switch media {
	case "multipart/form-data":
		return s.multipart(r, multipart.NewReader(body, params["boundary"]))
	case "application/octet-stream":
		if r.URL.Query().Get("path") == "" {
			return nil, &httpError{http.StatusBadRequest, "an octet-stream upload needs the path query"}
		}
		one, err := s.write(r, r.URL.Query().Get("path"), body, nil)
		if err != nil {
			return nil, err
		}
		return []Written{*one}, nil
	}
	return nil, &httpError{http.StatusBadRequest, "Content-Type " + media + " is not supported"}
}

// Decoded undoes the Content-Encoding of a request.
func Decoded(r *http.Request) (io.Reader, error) {
	switch encoding := strings.ToLower(r.Header.Get("Content-Encoding")); encoding {
	case "", "identity":
		return r.Body, nil
	case "gzip":
		zip, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, &httpError{http.StatusBadRequest, "the body is not gzip: " + err.Error()}
		}
		return zip, nil
	default:
		return nil, &httpError{http.StatusBadRequest, "Content-Encoding " + encoding + " is not supported: use gzip"}
	}
}

func (s *Service) multipart(r *http.Request, parts *multipart.Reader) ([]Written, error) {
	written := []Written{}
	seen := map[string]bool{}
	for {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, &httpError{http.StatusBadRequest, "malformed multipart body: " + err.Error()}
		}
		if part.FormName() != "file" {
			continue
		}
		target := r.URL.Query().Get("path")
		if target == "" {
			// Part.FileName would strip the directories, which clients mean.
			_, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if err != nil || params["filename"] == "" {
				return nil, &httpError{http.StatusBadRequest, "a part has no filename and the request no path"}
			}
			target = params["filename"]
		}
		one, err := s.write(r, target, part, seen)
		if err != nil {
			return nil, err
		}
		written = append(written, *one)
	}
	if len(written) == 0 {
		return nil, &httpError{http.StatusBadRequest, `the multipart body holds no part named "file"`}
	}
	return written, nil
}

func (s *Service) write(r *http.Request, target string, body io.Reader, seen map[string]bool) (*Written, error) {
	path, u, err := Resolve(s.settings, r, target)
	if err != nil {
		return nil, err
	}
	if seen != nil {
		if seen[path] {
			return nil, &httpError{http.StatusBadRequest, "the request names the same file twice: " + path}
		}
		seen[path] = true
	}
	if err := users.MkdirAll(filepath.Dir(path), u, 0o755); err != nil {
		return nil, err
	}
	if st, err := os.Stat(path); err == nil && !st.Mode().IsRegular() {
		if st.IsDir() {
			return nil, &httpError{http.StatusBadRequest, "path is a directory: " + path}
		}
		return nil, &httpError{http.StatusBadRequest, "path is not a regular file: " + path}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0o666)
	if err != nil {
		return nil, err
	}
	if users.Privileged() {
		err = f.Chown(int(u.UID), int(u.GID))
	}
	if err == nil {
		err = copyBody(f, body)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	return &Written{Path: path, Name: filepath.Base(path), Type: "file"}, nil
}

// copyBody tells a broken request from a full disk.
func copyBody(f *os.File, body io.Reader) error {
	buf := make([]byte, 128<<10)
	for {
		n, rerr := body.Read(buf)
		if n > 0 {
			if _, err := f.Write(buf[:n]); err != nil {
				return err
			}
		}
		if errors.Is(rerr, io.EOF) {
			return nil
		}
		if rerr != nil {
			return &httpError{http.StatusBadRequest, fmt.Sprintf("the request body ends early: %v", rerr)}
		}
	}
}
