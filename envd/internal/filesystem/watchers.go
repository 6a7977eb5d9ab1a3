package filesystem

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"sync"
	"sync/atomic"

	"aenv/envd/internal/connect"
)

const (
	// maxWatchers bounds streams and polled watchers together: each costs a
	// descriptor of inotify, of which a user has 128.
	maxWatchers = 64
	// What a polled watcher keeps until it is asked.
	maxQueued      = 10_000
	maxQueuedBytes = 2 << 20
)

// watchers are all that watch at the moment.
type watchers struct {
	dirs    atomic.Int64
	mu      sync.Mutex
	streams int
	polled  map[string]*watcher
	order   []string // of creation
}

// watcher collects changes for a client that asks for them.
type watcher struct {
	tree    *tree
	include bool

	mu     sync.Mutex
	queue  []change
	bytes  int
	over   bool
	failed error
}

func (w *watchers) enter() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.makeRoom(); err != nil {
		return err
	}
	w.streams++
	return nil
}

func (w *watchers) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.streams--
}

// makeRoom wants the lock. A polled watcher that can tell nothing more makes
// place for a new one: its client may never come back.
func (w *watchers) makeRoom() error {
	for i := 0; w.streams+len(w.polled) >= maxWatchers; {
		if i == len(w.order) {
			return connect.Errorf(connect.ResourceExhausted, "more than %d watchers: remove one", maxWatchers)
		}
		if !w.polled[w.order[i]].ended() {
			i++
			continue
		}
		delete(w.polled, w.order[i])
		w.order = append(w.order[:i], w.order[i+1:]...)
	}
	return nil
}

func (w *watchers) find(id string) (*watcher, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if found := w.polled[id]; found != nil {
		return found, nil
	}
	return nil, connect.Errorf(connect.NotFound, "watcher with id %q not found", id)
}

func (w *watchers) add(one *watcher) (string, error) {
	var raw [12]byte
	if _, err := rand.Read(raw[:]); err != nil {
		return "", err
	}
	id := "w" + hex.EncodeToString(raw[:])
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.makeRoom(); err != nil {
		return "", err
	}
	if w.polled == nil {
		w.polled = map[string]*watcher{}
	}
	w.polled[id] = one
	w.order = append(w.order, id)
	return id, nil
}

func (w *watchers) remove(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.polled, id)
	for i, known := range w.order {
		if known == id {
			w.order = append(w.order[:i], w.order[i+1:]...)
			return
		}
	}
}

func (w *watcher) ended() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.over
}

// collect runs until the tree ends.
func (w *watcher) collect() {
	err := w.tree.run(w.take)
	w.tree.close()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over = true; !errors.Is(err, errEnded) {
		w.failed = err
	}
}

func (w *watcher) take(c change) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	// A file that is written makes a notice for each write: one tells as much.
	if n := len(w.queue); n > 0 && w.queue[n-1] == c && (c.kind == EventWrite || c.kind == EventChmod) {
		return nil
	}
	if len(w.queue) >= maxQueued || w.bytes+len(c.name) > maxQueuedBytes {
		return errLost
	}
	w.queue, w.bytes = append(w.queue, c), w.bytes+len(c.name)
	return nil
}

// drain gives what was collected; after that, why nothing more will come.
func (w *watcher) drain() ([]change, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	queue := w.queue
	if w.queue, w.bytes = nil, 0; len(queue) > 0 {
		return queue, nil
	}
	return nil, w.failed
}

func (s *Service) createWatcher(call *connect.Call, req *WatchRequest) (*WatcherResponse, error) {
	t, err := s.watched(call, req)
	if err != nil {
		return nil, err
	}
	one := &watcher{tree: t, include: req.includeEntry()}
	id, err := s.watchers.add(one)
	if err != nil {
		t.close()
		t.release()
		return nil, err
	}
	go one.collect()
	return &WatcherResponse{id}, nil
}

func (s *Service) getWatcherEvents(_ *connect.Call, req *WatcherRequest) (*EventsResponse, error) {
	one, err := s.watchers.find(req.id())
	if err != nil {
		return nil, err
	}
	changes, err := one.drain()
	if err != nil {
		return nil, err
	}
	describer, res := s.describerIf(one.include), &EventsResponse{Events: []*FilesystemEvent{}}
	for _, c := range changes {
		res.Events = append(res.Events, describer.event(one.tree.root, c))
	}
	return res, nil
}

func (s *Service) removeWatcher(_ *connect.Call, req *WatcherRequest) (*Empty, error) {
	one, err := s.watchers.find(req.id())
	if err != nil {
		return nil, err
	}
	one.tree.close()
	s.watchers.remove(req.id())
	return &Empty{}, nil
}
