package filesystem

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// watching is a tree whose changes are collected as text.
type watching struct {
	t     *testing.T
	tree  *tree
	total *atomic.Int64
	seen  chan string
	ended chan error
}

func watch(t *testing.T, root string, recursive bool) *watching {
	t.Helper()
	w := &watching{t: t, total: &atomic.Int64{}, seen: make(chan string, 1000), ended: make(chan error, 1)}
	var err error
	if w.tree, err = newTree(root, recursive, w.total); err != nil {
		t.Fatal(err)
	}
	go func() {
		w.ended <- w.tree.run(func(c change) error {
			// Kernels differ in whether a directory that goes changes its attributes first.
			if told := strings.ToLower(strings.TrimPrefix(c.kind.String(), "EVENT_TYPE_")) + " " + c.name; told != "chmod ." {
				w.seen <- told
			}
			return nil
		})
	}()
	t.Cleanup(w.tree.close)
	return w
}

// expect waits for these changes, in order, and skips no other.
func (w *watching) expect(changes ...string) {
	w.t.Helper()
	for _, want := range changes {
		select {
		case got := <-w.seen:
			if got != want {
				w.t.Fatalf("got %q, want %q", got, want)
			}
		case <-time.After(10 * time.Second):
			w.t.Fatalf("never: %q", want)
		}
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func TestChangesOfADirectory(t *testing.T) {
	root := t.TempDir()
	must(t, os.Mkdir(root+"/sub", 0o755))
	w := watch(t, root, false)
	must(t, os.WriteFile(root+"/f", []byte("x"), 0o644))
	w.expect("create f", "write f")
	must(t, os.Chmod(root+"/f", 0o600), os.Rename(root+"/f", root+"/g"), os.Remove(root+"/g"))
	w.expect("chmod f", "rename f", "create g", "remove g")
	must(t, os.WriteFile(root+"/sub/quiet", nil, 0o644), os.Symlink("f", root+"/link"))
	w.expect("create link")
	must(t, os.RemoveAll(root))
	w.expect("remove link", "remove sub", "remove .")
	if err := <-w.ended; !errors.Is(err, errEnded) || w.total.Load() != 0 {
		t.Errorf("%v, %d directories are still counted", err, w.total.Load())
	}
}

func TestChangesBelowADirectory(t *testing.T) {
	root, outside := t.TempDir(), t.TempDir()
	must(t, os.MkdirAll(root+"/a/b", 0o755), os.Symlink(outside, root+"/a/out"))
	w := watch(t, root, true)
	must(t, os.WriteFile(root+"/a/b/f", nil, 0o644), os.WriteFile(outside+"/quiet", nil, 0o644))
	w.expect("create a/b/f")
	must(t, os.Rename(root+"/a", root+"/c"))
	w.expect("rename a", "create c")
	must(t, os.Remove(root+"/c/b/f"))
	w.expect("remove c/b/f")
	must(t, os.Rename(root+"/c/b", outside+"/b"))
	w.expect("rename c/b")
	must(t, os.WriteFile(outside+"/b/quiet", nil, 0o644), os.Mkdir(root+"/end", 0o755))
	w.expect("create end")
	must(t, os.Rename(outside+"/b", root+"/end/b"))
	w.expect("create end/b", "create end/b/quiet")
	must(t, os.WriteFile(root+"/end/b/loud", nil, 0o644))
	w.expect("create end/b/loud")
}

func TestNothingIsMissedInADirectoryThatIsFilledAtOnce(t *testing.T) {
	root := t.TempDir()
	w := watch(t, root, true)
	const width, depth = 20, 8
	dir := root
	want := map[string]bool{}
	for d := 0; d < depth; d++ {
		dir = filepath.Join(dir, "d")
		must(t, os.Mkdir(dir, 0o755))
		for i := 0; i < width; i++ {
			name := filepath.Join(dir, fmt.Sprint(i))
			must(t, os.WriteFile(name, nil, 0o644))
			want[strings.TrimPrefix(name, root+"/")] = true
		}
	}
	for len(want) > 0 {
		select {
		case got := <-w.seen:
			name, created := strings.CutPrefix(got, "create ")
			if !created {
				t.Fatalf("got %q", got)
			}
			if !want[name] && filepath.Base(name) != "d" {
				t.Fatalf("%q twice, or of nothing", got)
			}
			delete(want, name)
		case <-time.After(10 * time.Second):
			t.Fatalf("%d were missed", len(want))
		}
	}
}

func TestDirectoriesOfAllWatchersAreBounded(t *testing.T) {
	root := t.TempDir()
	must(t, os.MkdirAll(root+"/a/b", 0o755))
	var total atomic.Int64
	total.Store(maxWatchedDirs - 2)
	if _, err := newTree(root, true, &total); err == nil || total.Load() != maxWatchedDirs-2 {
		t.Errorf("%v, %d are counted", err, total.Load())
	}
	one, err := newTree(root, false, &total)
	must(t, err)
	one.close()
	if err := one.run(nil); err != nil || total.Load() != maxWatchedDirs-2 {
		t.Errorf("%v, %d are counted", err, total.Load())
	}
}

func TestAnOverflowIsTold(t *testing.T) {
	tr := &tree{dirs: map[int32]string{}, total: &atomic.Int64{}}
	if err := tr.take(&notice{wd: -1, mask: syscall.IN_Q_OVERFLOW}, nil); !errors.Is(err, errLost) {
		t.Error(err)
	}
	w := &watcher{tree: tr}
	var err error
	for i := 0; err == nil && i <= maxQueued; i++ {
		err = w.take(change{fmt.Sprint(i), EventCreate})
	}
	if !errors.Is(err, errLost) || len(w.queue) != maxQueued {
		t.Errorf("%v after %d", err, len(w.queue))
	}
	w.over, w.failed = true, err
	if changes, err := w.drain(); err != nil || len(changes) != maxQueued {
		t.Errorf("%v, %d", err, len(changes))
	}
	if _, err := w.drain(); !errors.Is(err, errLost) {
		t.Error(err)
	}
}

func TestWritesInARowAreOne(t *testing.T) {
	w := &watcher{}
	for _, c := range []change{{"f", EventWrite}, {"f", EventWrite}, {"g", EventWrite}, {"f", EventWrite}, {"f", EventCreate}, {"f", EventCreate}} {
		must(t, w.take(c))
	}
	if len(w.queue) != 5 {
		t.Error(w.queue)
	}
}

func TestWatchersAreBoundedAndThoseThatEndedMakeRoom(t *testing.T) {
	var w watchers
	for i := 0; i < maxWatchers-1; i++ {
		_, err := w.add(&watcher{})
		must(t, err)
	}
	must(t, w.enter())
	if _, err := w.add(&watcher{}); err == nil {
		t.Error("one more is accepted")
	}
	if err := w.enter(); err == nil {
		t.Error("one more stream is accepted")
	}
	oldest := w.order[0]
	w.polled[oldest].over = true
	id, err := w.add(&watcher{})
	must(t, err)
	if _, err := w.find(oldest); err == nil {
		t.Error("the ended one is still there")
	}
	w.remove(id)
	w.leave()
	must(t, w.enter(), w.enter())
}

func TestRequestsOfWatchingHaveBothSpellings(t *testing.T) {
	for _, text := range []string{
		`{"includeEntry":true,"allowNetworkMounts":true,"watcherId":"w"}`,
		`{"include_entry":true,"allow_network_mounts":true,"watcher_id":"w"}`,
	} {
		var watch WatchRequest
		var watcher WatcherRequest
		must(t, json.Unmarshal([]byte(text), &watch), json.Unmarshal([]byte(text), &watcher))
		if !watch.includeEntry() || !watch.allowNetwork() || watcher.id() != "w" {
			t.Errorf("%s: %+v %+v", text, watch, watcher)
		}
	}
}

func FuzzNotices(f *testing.F) {
	f.Add([]byte("\x01\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00a\x00\x00\x00"))
	f.Add([]byte("\x01\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\xff\xff\xff\xffa"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, n := range parseNotices(data) {
			if strings.ContainsRune(n.name, 0) {
				t.Fatalf("%q", n.name)
			}
		}
	})
}
