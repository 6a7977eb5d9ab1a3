package files

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// maxPseudo bounds files of /proc and /sys, which say they are empty.
const maxPseudo = 4 << 20

// Download serves GET /files.
func (s *Service) Download(w http.ResponseWriter, r *http.Request) {
	if err := s.download(w, r); err != nil {
		Fail(w, StatusOf(err), err.Error())
	}
}

func (s *Service) download(w http.ResponseWriter, r *http.Request) error {
	path, _, err := Resolve(s.settings, r, r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	encoding, err := negotiate(r.Header.Get("Accept-Encoding"))
	if err != nil {
		return err
	}
	// Non-blocking: opening a FIFO must not wait for its writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	switch {
	case st.IsDir():
		return &httpError{http.StatusBadRequest, "path is a directory: " + path}
	case !st.Mode().IsRegular():
		return &httpError{http.StatusBadRequest, "path is not a regular file: " + path}
	}
	w.Header().Set("Vary", "Accept-Encoding")
	if encoding == "gzip" && plainRequest(r) {
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Type", "application/octet-stream")
		zip := gzip.NewWriter(w)
		if _, err := io.Copy(zip, f); err != nil {
			panic(http.ErrAbortHandler) // the client must see that it is cut short
		}
		_ = zip.Close()
		return nil
	}
	return serve(w, r, f, st)
}

func serve(w http.ResponseWriter, r *http.Request, f *os.File, st os.FileInfo) error {
	var content io.ReadSeeker = f
	if st.Size() == 0 {
		data, err := io.ReadAll(io.LimitReader(f, maxPseudo))
		if err != nil {
			return err
		}
		content = bytes.NewReader(data)
		if len(data) == 0 && mime.TypeByExtension(filepath.Ext(st.Name())) == "" {
			w.Header().Set("Content-Type", "application/octet-stream")
		}
	} else {
		w.Header().Set("ETag", tag(st))
	}
	http.ServeContent(w, r, st.Name(), st.ModTime().Truncate(time.Second), content)
	return nil
}

// tag changes with every write that the clock of the file system tells apart; a
// date alone has whole seconds, too coarse to resume a download by.
func tag(st os.FileInfo) string {
	var inode uint64
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		inode = sys.Ino
	}
	return fmt.Sprintf(`"%x-%x-%x"`, inode, st.Size(), st.ModTime().UnixNano())
}

// plainRequest says that neither a range nor a condition is asked for.
func plainRequest(r *http.Request) bool {
	for _, name := range []string{"Range", "If-Range", "If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since"} {
		if r.Header.Get(name) != "" {
			return false
		}
	}
	return true
}

// negotiate picks gzip or identity; 406 when the client takes neither.
func negotiate(header string) (string, error) {
	if strings.TrimSpace(header) == "" {
		return "identity", nil
	}
	weights := map[string]float64{}
	for _, part := range strings.Split(header, ",") {
		name, params, _ := strings.Cut(strings.TrimSpace(part), ";")
		name, weight := strings.ToLower(strings.TrimSpace(name)), 1.0
		if q, ok := strings.CutPrefix(strings.ReplaceAll(params, " ", ""), "q="); ok {
			var err error
			if weight, err = strconv.ParseFloat(q, 64); err != nil || weight < 0 || weight > 1 {
				return "", &httpError{http.StatusBadRequest, "malformed Accept-Encoding: " + header}
			}
		} else if params != "" {
			return "", &httpError{http.StatusBadRequest, "malformed Accept-Encoding: " + header}
		}
		if name != "" {
			weights[name] = weight
		}
	}
	weight := func(name string, fallback float64) float64 {
		if q, ok := weights[name]; ok {
			return q
		}
		if q, ok := weights["*"]; ok {
			return q
		}
		return fallback
	}
	zip, plain := weights["gzip"], weight("identity", 1)
	if _, ok := weights["gzip"]; !ok && plain == 0 {
		zip = weight("gzip", 0)
	}
	_, plainAsked := weights["identity"]
	switch {
	case zip > 0 && (!plainAsked || zip >= plain):
		return "gzip", nil
	case plain > 0:
		return "identity", nil
	}
	return "", &httpError{http.StatusNotAcceptable, "no acceptable encoding: offer gzip or identity"}
}
