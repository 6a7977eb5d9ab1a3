package filesystem

import (
	"errors"
	"os"
	"path"
	"syscall"

	"aenv/envd/internal/connect"
)

// run tells of changes until the tree is closed (nil), its root is gone
// (errEnded) or something is lost.
func (t *tree) run(emit emitter) error {
	defer t.release()
	buf := make([]byte, noticeBuffer)
	for {
		notices, err := t.notify.read(buf)
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return connect.Errorf(connect.Internal, "cannot read the changes of %s: %v", t.root, err)
		}
		for i := range notices {
			if err := t.take(&notices[i], emit); err != nil {
				return err
			}
		}
		if !t.notify.waiting() {
			t.settle()
			clear(t.told) // their notices have been read
		}
	}
}

// settle gives up on a directory that left its place: it went out of the tree.
func (t *tree) settle() {
	if t.moved != "" {
		t.forget(t.moved)
		t.moved = ""
	}
}

func (t *tree) take(n *notice, emit emitter) error {
	if n.mask&syscall.IN_Q_OVERFLOW != 0 {
		return errLost
	}
	dir, known := t.dirs[n.wd]
	if !known {
		return nil
	}
	arrived := n.mask&syscall.IN_MOVED_TO != 0 && t.moved != "" && n.cookie == t.movedCookie
	if !arrived {
		t.settle()
	}
	if n.mask&syscall.IN_IGNORED != 0 {
		t.drop(n.wd)
	}
	switch {
	case n.name != "":
		return t.child(n, path.Join(dir, n.name), arrived, emit)
	case dir == ".":
		return t.self(n, emit)
	}
	return nil // its parent is watched and tells the same
}

// self is what happens to the root.
func (t *tree) self(n *notice, emit emitter) error {
	kind, over := EventChmod, true
	switch {
	case n.mask&syscall.IN_DELETE_SELF != 0:
		kind = EventRemove
	case n.mask&syscall.IN_MOVE_SELF != 0:
		kind = EventRename
	case n.mask&(syscall.IN_UNMOUNT|syscall.IN_IGNORED) != 0:
		return errEnded
	case n.mask&syscall.IN_ATTRIB != 0:
		over = false
	default:
		return nil
	}
	if err := emit(change{".", kind}); err != nil || !over {
		return err
	}
	return errEnded
}

// child is what happens to an entry of a watched directory. One notice may say
// several things: they are told in the order of the protocol.
func (t *tree) child(n *notice, name string, arrived bool, emit emitter) error {
	isDir := t.recursive && n.mask&syscall.IN_ISDIR != 0
	for _, step := range []struct {
		mask uint32
		kind EventType
	}{
		{syscall.IN_CREATE | syscall.IN_MOVED_TO, EventCreate},
		{syscall.IN_MOVED_FROM, EventRename},
		{syscall.IN_ATTRIB, EventChmod},
		{syscall.IN_MODIFY, EventWrite},
		{syscall.IN_DELETE, EventRemove},
	} {
		if n.mask&step.mask == 0 {
			continue
		}
		told := step.kind == EventCreate && t.told[name]
		delete(t.told, name)
		if told {
			continue // found with the new directory that holds it, which is watched since
		}
		if err := emit(change{name, step.kind}); err != nil {
			return err
		}
		if isDir && step.kind == EventCreate {
			if err := t.appeared(name, arrived, emit); err != nil {
				return err
			}
		}
		if isDir && step.kind == EventRename {
			t.moved, t.movedCookie = name, n.cookie
		}
	}
	return nil
}

// appeared watches a directory that is new at its place. What was moved within
// the tree is known already.
func (t *tree) appeared(name string, arrived bool, emit emitter) error {
	if arrived {
		from := t.moved
		t.moved = ""
		if t.rename(from, name) {
			return nil
		}
	}
	return t.enter(name, emit)
}
