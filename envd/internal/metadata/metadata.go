// Package metadata keeps what a client says about a file beside its content, as
// extended attributes user.e2b.KEY: it stays with the file, in archives,
// snapshots and forks.
package metadata

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"unicode/utf8"
)

const (
	prefix       = "user.e2b."
	headerPrefix = "X-Metadata-"

	maxName  = 255 // of an attribute with its prefix, in Linux
	maxValue = 64 << 10
	maxNames = 64 << 10 // of all names of one file, in Linux
	// maxFile bounds what is told of one file: others may have set more.
	maxFile = 256 << 10
)

// ErrInvalid says that no file can have such metadata.
var ErrInvalid = errors.New("invalid metadata")

// FromHeaders takes the metadata of an upload. Keys are in lower case, as
// headers have no case.
func FromHeaders(h http.Header) (map[string]string, error) {
	found := map[string]string{}
	for name, values := range h {
		key, ok := strings.CutPrefix(name, headerPrefix)
		if !ok || key == "" || len(values) == 0 {
			continue
		}
		key = strings.ToLower(key)
		switch value := values[0]; {
		case len(prefix)+len(key) > maxName:
			return nil, fmt.Errorf("%w: the key %q is longer than %d bytes", ErrInvalid, key, maxName-len(prefix))
		case len(value) > maxValue || !utf8.ValidString(value):
			return nil, fmt.Errorf("%w: the value of %q is not UTF-8 of at most %d bytes", ErrInvalid, key, maxValue)
		default:
			found[key] = value
		}
	}
	return found, nil
}

// Unsupported says that a file system has no such attributes: /proc, or a
// memory file system of an old kernel.
func Unsupported(err error) bool {
	return errors.Is(err, syscall.ENOTSUP) || errors.Is(err, syscall.ENOSYS)
}

// Replace makes values the whole metadata of an open file.
func Replace(fd int, values map[string]string) error {
	names, err := listFd(fd)
	if err != nil {
		if len(values) == 0 && Unsupported(err) {
			return nil
		}
		return err
	}
	for _, name := range names {
		key, ours := strings.CutPrefix(name, prefix)
		if _, kept := values[key]; ours && !kept {
			if err := removeFd(fd, name); err != nil && !errors.Is(err, syscall.ENODATA) {
				return err
			}
		}
	}
	for key, value := range values {
		if err := setFd(fd, prefix+key, value); err != nil {
			return err
		}
	}
	return nil
}

// Of reads the metadata of a file without following a link: nil when there is
// none, or none can be read.
func Of(path string) map[string]string {
	names, err := list(path)
	if err != nil {
		return nil
	}
	var found map[string]string
	total := 0
	for _, name := range names {
		key, ours := strings.CutPrefix(name, prefix)
		if !ours || key == "" {
			continue
		}
		value, err := get(path, name)
		total += len(key) + len(value)
		if err != nil || total > maxFile {
			continue
		}
		if found == nil {
			found = map[string]string{}
		}
		found[strings.ToValidUTF8(key, "\uFFFD")] = strings.ToValidUTF8(value, "\uFFFD")
	}
	return found
}
