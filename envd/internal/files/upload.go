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

	"aenv/envd/internal/metadata"
	"aenv/envd/internal/users"
)

// maxFiles bounds one multipart request: each is remembered until the reply.
const maxFiles = 100_000

// Written describes one uploaded file.
type Written struct {
	Path string `json:"path"`
	Name string `json:"name"`
	Type string `json:"type"`
	// Metadata is what the file has now, read back.
	Metadata map[string]string `json:"metadata,omitempty"`
}

// order is one upload request: what holds for all of its files.
type order struct {
	*http.Request
	metadata map[string]string
	seen     map[string]bool
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
	values, err := metadata.FromHeaders(r.Header)
	if err != nil {
		return nil, err
	}
	media, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, &httpError{http.StatusBadRequest, "the Content-Type is missing or malformed"}
	}
	body, err := Decoded(r)
	if err != nil {
		return nil, err
	}
	o := &order{Request: r, metadata: values, seen: map[string]bool{}}
	switch media {
	case "multipart/form-data":
		return s.multipart(o, multipart.NewReader(body, params["boundary"]))
	case "application/octet-stream":
		if r.URL.Query().Get("path") == "" {
			return nil, &httpError{http.StatusBadRequest, "an octet-stream upload needs the path query"}
		}
		one, err := s.write(o, r.URL.Query().Get("path"), body)
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

func (s *Service) multipart(o *order, parts *multipart.Reader) ([]Written, error) {
	written := []Written{}
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
		target := o.URL.Query().Get("path")
		if target == "" {
			// Part.FileName would strip the directories, which clients mean.
			_, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if err != nil || params["filename"] == "" {
				return nil, &httpError{http.StatusBadRequest, "a part has no filename and the request no path"}
			}
			target = params["filename"]
		}
		one, err := s.write(o, target, part)
		if err != nil {
			return nil, err
		}
		if written = append(written, *one); len(written) > maxFiles {
			return nil, badRequest("more than %d files in one request", maxFiles)
		}
	}
	if len(written) == 0 {
		return nil, &httpError{http.StatusBadRequest, `the multipart body holds no part named "file"`}
	}
	return written, nil
}

func (s *Service) write(o *order, target string, body io.Reader) (*Written, error) {
	path, u, err := Resolve(s.settings, o.Request, target)
	if err != nil {
		return nil, err
	}
	if o.seen[path] {
		return nil, &httpError{http.StatusBadRequest, "the request names the same file twice: " + path}
	}
	o.seen[path] = true
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
	if err == nil {
		err = describe(f, o.metadata)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	written := &Written{Path: path, Name: filepath.Base(path), Type: "file"}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		written.Metadata = metadata.Of(real)
	}
	return written, nil
}

// describe replaces the metadata, also by none: it was that of the old content.
// Where a file system has none the content still counts, and the reply tells.
func describe(f *os.File, values map[string]string) error {
	if err := metadata.Replace(int(f.Fd()), values); err != nil && !metadata.Unsupported(err) {
		return fmt.Errorf("cannot store the metadata of %s: %w", f.Name(), err)
	}
	return nil
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
