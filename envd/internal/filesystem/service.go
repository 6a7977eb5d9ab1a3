package filesystem

import (
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"syscall"

	"aenv/envd/internal/connect"
	"aenv/envd/internal/users"
)

// maxEntries bounds one listing: a deep walk of a large tree would not fit in
// the memory of a small sandbox.
const maxEntries = 200_000

// Settings is what the service must know of the daemon.
type Settings interface {
	RPCUser(call *connect.Call) (*users.User, error)
	Workdir() string
}

// Service serves the methods.
type Service struct {
	settings Settings
	db       users.DB
	watchers watchers
}

// New makes one.
func New(settings Settings, db users.DB) *Service { return &Service{settings: settings, db: db} }

// Handlers are the methods by name.
func (s *Service) Handlers() map[string]http.Handler {
	return map[string]http.Handler{
		"Stat":             connect.Unary(s.stat),
		"MakeDir":          connect.Unary(s.makeDir),
		"Move":             connect.Unary(s.move),
		"ListDir":          connect.Unary(s.listDir),
		"Remove":           connect.Unary(s.remove),
		"WatchDir":         connect.ServerStream(s.watchDir),
		"CreateWatcher":    connect.Unary(s.createWatcher),
		"GetWatcherEvents": connect.Unary(s.getWatcherEvents),
		"RemoveWatcher":    connect.Unary(s.removeWatcher),
	}
}

func (s *Service) resolve(call *connect.Call, path string) (string, *users.User, error) {
	u, err := s.settings.RPCUser(call)
	if err != nil {
		return "", nil, err
	}
	full, err := users.Resolve(path, u, s.settings.Workdir())
	if err != nil {
		return "", nil, connect.Errorf(connect.InvalidArgument, "%v", err)
	}
	return full, u, nil
}

func (s *Service) entry(path string) (*EntryResponse, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, pathError(path, err)
	}
	entry, err := s.describer().entry(path, info)
	if err != nil {
		return nil, err
	}
	return &EntryResponse{entry}, nil
}

func pathError(path string, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return connect.Errorf(connect.NotFound, "path not found: %s", path)
	}
	return connect.AsError(err)
}

func (s *Service) stat(call *connect.Call, req *PathRequest) (*EntryResponse, error) {
	path, _, err := s.resolve(call, req.Path)
	if err != nil {
		return nil, err
	}
	return s.entry(path)
}

func (s *Service) makeDir(call *connect.Call, req *PathRequest) (*EntryResponse, error) {
	path, u, err := s.resolve(call, req.Path)
	if err != nil {
		return nil, err
	}
	if st, err := os.Stat(path); err == nil {
		if st.IsDir() {
			return nil, connect.Errorf(connect.AlreadyExists, "directory already exists: %s", path)
		}
		return nil, connect.Errorf(connect.InvalidArgument, "path exists and is not a directory: %s", path)
	}
	if err := users.MkdirAll(path, u, 0o755); err != nil {
		return nil, connect.AsError(err)
	}
	return s.entry(path)
}

func (s *Service) move(call *connect.Call, req *MoveRequest) (*EntryResponse, error) {
	source, u, err := s.resolve(call, req.Source)
	if err != nil {
		return nil, err
	}
	destination, _, err := s.resolve(call, req.Destination)
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(source); err != nil {
		return nil, pathError(source, err)
	}
	if err := users.MkdirAll(filepath.Dir(destination), u, 0o755); err != nil {
		return nil, connect.AsError(err)
	}
	if err := os.Rename(source, destination); err != nil {
		if errors.Is(err, syscall.EXDEV) {
			return nil, connect.Errorf(connect.FailedPrecondition,
				"cannot move %s to %s: they are on different file systems", source, destination)
		}
		return nil, connect.AsError(err)
	}
	return s.entry(destination)
}

func (s *Service) remove(call *connect.Call, req *PathRequest) (*Empty, error) {
	path, _, err := s.resolve(call, req.Path)
	if err != nil {
		return nil, err
	}
	if filepath.Clean(path) == "/" {
		return nil, connect.Errorf(connect.InvalidArgument, "refusing to remove /")
	}
	if err := os.RemoveAll(path); err != nil {
		return nil, connect.AsError(err)
	}
	return &Empty{}, nil
}

func (s *Service) listDir(call *connect.Call, req *ListRequest) (*ListResponse, error) {
	path, _, err := s.resolve(call, req.Path)
	if err != nil {
		return nil, err
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, pathError(path, err)
	}
	if !st.IsDir() {
		return nil, connect.Errorf(connect.InvalidArgument, "path is not a directory: %s", path)
	}
	l := &lister{call: call, describer: s.describer(), entries: []*Entry{}}
	depth := int(req.Depth)
	if depth == 0 {
		depth = 1
	}
	if err := l.walk(path, depth); err != nil {
		return nil, err
	}
	return &ListResponse{l.entries}, nil
}

type lister struct {
	*describer
	call    *connect.Call
	entries []*Entry
}

// walk does not follow links below the first directory.
func (l *lister) walk(dir string, depth int) error {
	if l.call.Err() != nil {
		return l.call.Ended()
	}
	f, err := os.Open(dir)
	if err != nil {
		return pathError(dir, err)
	}
	children, err := f.Readdirnames(maxEntries + 1)
	f.Close()
	if err != nil && len(children) == 0 && !errors.Is(err, io.EOF) {
		return connect.AsError(err)
	}
	sort.Strings(children)
	for _, name := range children {
		if len(l.entries) >= maxEntries {
			return connect.TooLargef("more than %d entries: list with a smaller depth", maxEntries)
		}
		path := filepath.Join(dir, name)
		info, err := os.Lstat(path)
		if err != nil {
			continue // it went away meanwhile
		}
		entry, err := l.entry(path, info)
		if err != nil {
			return err
		}
		l.entries = append(l.entries, entry)
		if info.IsDir() && depth > 1 {
			if err := l.walk(path, depth-1); err != nil && !gone(err) {
				return err
			}
		}
	}
	return nil
}

func gone(err error) bool {
	code := connect.AsError(err).Code
	return code == connect.NotFound || code == connect.PermissionDenied
}
