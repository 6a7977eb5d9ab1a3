package filesystem

import "aenv/envd/internal/connect"

// The messages of filesystem.Filesystem: names in JSON, numbers in protobuf.

// PathRequest names one path.
type PathRequest struct {
	Path string `json:"path" pb:"1"`
}

// ListRequest lists a directory to a depth; 0 is 1.
type ListRequest struct {
	Path  string         `json:"path" pb:"1"`
	Depth connect.Uint32 `json:"depth" pb:"2"`
}

// MoveRequest renames.
type MoveRequest struct {
	Source      string `json:"source" pb:"1"`
	Destination string `json:"destination" pb:"2"`
}

// EntryResponse is one entry.
type EntryResponse struct {
	Entry *Entry `json:"entry" pb:"1"`
}

// ListResponse is the entries of a directory.
type ListResponse struct {
	Entries []*Entry `json:"entries" pb:"1"`
}

// Empty says only that it worked.
type Empty struct{}

// WatchRequest is the request of WatchDir and CreateWatcher. JSON may also spell
// its fields as the protocol's source does.
type WatchRequest struct {
	Path               string `json:"path" pb:"1"`
	Recursive          bool   `json:"recursive" pb:"2"`
	IncludeEntry       bool   `json:"includeEntry" pb:"3"`
	AllowNetworkMounts bool   `json:"allowNetworkMounts" pb:"4"`

	SnakeIncludeEntry       bool `json:"include_entry"`
	SnakeAllowNetworkMounts bool `json:"allow_network_mounts"`
}

func (r *WatchRequest) includeEntry() bool { return r.IncludeEntry || r.SnakeIncludeEntry }
func (r *WatchRequest) allowNetwork() bool { return r.AllowNetworkMounts || r.SnakeAllowNetworkMounts }

// WatcherRequest names a watcher that is polled.
type WatcherRequest struct {
	ID      string `json:"watcherId" pb:"1"`
	SnakeID string `json:"watcher_id"`
}

func (r *WatcherRequest) id() string {
	if r.ID == "" {
		return r.SnakeID
	}
	return r.ID
}

// WatcherResponse is the name of a new watcher.
type WatcherResponse struct {
	ID string `json:"watcherId" pb:"1"`
}

// EventsResponse is what happened since the last call.
type EventsResponse struct {
	Events []*FilesystemEvent `json:"events" pb:"1"`
}

// FilesystemEvent is one change.
type FilesystemEvent struct {
	Name  string    `json:"name" pb:"1"`
	Type  EventType `json:"type" pb:"2"`
	Entry *Entry    `json:"entry,omitempty" pb:"3"`
}

// WatchMessage has exactly one field set.
type WatchMessage struct {
	Start      *Empty           `json:"start,omitempty" pb:"1"`
	Filesystem *FilesystemEvent `json:"filesystem,omitempty" pb:"2"`
	Keepalive  *Empty           `json:"keepalive,omitempty" pb:"3"`
}
