package filesystem

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"strings"
	"sync/atomic"
	"syscall"

	"aenv/envd/internal/connect"
)

const (
	// maxWatchedDirs bounds the directories of all watchers together.
	maxWatchedDirs = 1 << 16
	noticeBuffer   = 64 << 10
	dirBatch       = 512
	maxTold        = 1 << 14

	watchMask = syscall.IN_CREATE | syscall.IN_MOVED_TO | syscall.IN_MOVED_FROM | syscall.IN_DELETE | syscall.IN_MODIFY |
		syscall.IN_ATTRIB | syscall.IN_ONLYDIR
	rootMask = watchMask | syscall.IN_DELETE_SELF | syscall.IN_MOVE_SELF
)

var (
	// errEnded: the watched directory itself is gone.
	errEnded = errors.New("the watched directory is gone")
	errLost  = connect.Errorf(connect.ResourceExhausted,
		"changes came faster than they could be told, and some are lost: watch again and list the directory")
)

// change is one event, named relative to the watched directory.
type change struct {
	name string
	kind EventType
}

type emitter func(change) error

// tree watches a directory, and all below it when recursive.
type tree struct {
	notify    *inotify
	root      string
	recursive bool
	dirs      map[int32]string // relative, "." for the root
	total     *atomic.Int64    // directories of all trees
	// moved is a directory that left its place, until it is known where to.
	moved       string
	movedCookie uint32
	// told are entries found in a new directory before their own notice came.
	told map[string]bool
}

// newTree watches from now on.
func newTree(root string, recursive bool, total *atomic.Int64) (*tree, error) {
	notify, err := openInotify()
	if err != nil {
		return nil, connect.Errorf(connect.ResourceExhausted, "cannot watch: %v", err)
	}
	t := &tree{notify: notify, root: root, recursive: recursive, dirs: map[int32]string{}, total: total, told: map[string]bool{}}
	err = t.watch(".", rootMask)
	if err == nil && recursive {
		err = t.below(".", nil)
	}
	if err != nil {
		t.close()
		t.release()
		return nil, err
	}
	return t, nil
}

// close ends run. The watches go with the descriptor.
func (t *tree) close() { t.notify.close() }

// release gives the room back, once, after run.
func (t *tree) release() {
	t.total.Add(-int64(len(t.dirs)))
	t.dirs = nil
}

func (t *tree) full(rel string) string { return path.Join(t.root, rel) }

func (t *tree) watch(rel string, mask uint32) error {
	if rel != "." {
		mask |= syscall.IN_DONT_FOLLOW
	}
	wd, err := t.notify.add(t.full(rel), mask)
	if errors.Is(err, syscall.ENOSPC) {
		return connect.TooLargef("cannot watch %s: the kernel has no room for more watched directories", t.full(rel))
	}
	if err != nil {
		return &os.PathError{Op: "watch", Path: t.full(rel), Err: err}
	}
	if _, known := t.dirs[wd]; !known {
		if t.total.Add(1) > maxWatchedDirs {
			t.total.Add(-1)
			t.notify.remove(wd)
			return tooMany()
		}
	}
	t.dirs[wd] = rel
	return nil
}

// below watches the directories under rel, links not followed. With emit it
// tells of every entry: they are older than the watch and have no notice.
func (t *tree) below(rel string, emit emitter) error {
	inner, err := t.entries(rel, emit)
	if err != nil && !passed(err) {
		return err
	}
	// Closed by now: a deep tree must not hold a descriptor for each level.
	for _, name := range inner {
		if err := t.enter(name, emit); err != nil {
			return err
		}
	}
	return nil
}

// entries tells of what is in a directory and lists the directories of it.
func (t *tree) entries(rel string, emit emitter) (inner []string, err error) {
	dir, err := os.Open(t.full(rel))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	for {
		entries, err := dir.ReadDir(dirBatch)
		for _, entry := range entries {
			name := path.Join(rel, entry.Name())
			if err := t.tell(name, emit); err != nil {
				return nil, err
			}
			if entry.IsDir() {
				inner = append(inner, name)
			}
		}
		if len(inner) > maxWatchedDirs {
			return nil, tooMany()
		}
		if err != nil || len(entries) == 0 {
			return inner, nil
		}
	}
}

func (t *tree) tell(name string, emit emitter) error {
	if emit == nil {
		return nil
	}
	if len(t.told) < maxTold {
		t.told[name] = true
	}
	return emit(change{name, EventCreate})
}

// passed: what went away meanwhile, or cannot be entered, is not watched.
func passed(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, fs.ErrPermission) ||
		errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENAMETOOLONG)
}

func tooMany() error {
	return connect.TooLargef("more than %d directories are watched", maxWatchedDirs)
}

// enter watches a directory and what is below it; one that is gone is none.
func (t *tree) enter(name string, emit emitter) error {
	err := t.watch(name, watchMask)
	if err != nil && passed(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return t.below(name, emit)
}

// forget drops the watches of a directory that is no longer below the root.
func (t *tree) forget(name string) {
	for wd, rel := range t.dirs {
		if within(rel, name) {
			t.drop(wd)
			t.notify.remove(wd)
		}
	}
}

func (t *tree) drop(wd int32) {
	if _, known := t.dirs[wd]; known {
		delete(t.dirs, wd)
		t.total.Add(-1)
	}
}

// rename follows a directory within the tree; false when it was not watched.
func (t *tree) rename(from, to string) bool {
	known := false
	for wd, rel := range t.dirs {
		if within(rel, from) {
			t.dirs[wd] = to + strings.TrimPrefix(rel, from)
			known = known || rel == from
		}
	}
	return known
}

func within(rel, dir string) bool { return rel == dir || strings.HasPrefix(rel, dir+"/") }
