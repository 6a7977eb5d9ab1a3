package filesystem

import (
	"encoding/json"
	"strconv"
)

// FileType is the enum of the protocol: a name in JSON, a number in protobuf.
type FileType int32

// The types of entries.
const (
	TypeUnspecified FileType = iota
	TypeFile
	TypeDirectory
	TypeSymlink
)

// EventType is what happened to an entry.
type EventType int32

// The types of events.
const (
	EventUnspecified EventType = iota
	EventCreate
	EventWrite
	EventRemove
	EventRename
	EventChmod
)

var (
	fileTypes  = []string{"FILE_TYPE_UNSPECIFIED", "FILE_TYPE_FILE", "FILE_TYPE_DIRECTORY", "FILE_TYPE_SYMLINK"}
	eventTypes = []string{"EVENT_TYPE_UNSPECIFIED", "EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE", "EVENT_TYPE_REMOVE",
		"EVENT_TYPE_RENAME", "EVENT_TYPE_CHMOD"}
)

func (t FileType) String() string  { return enumName(fileTypes, int32(t)) }
func (t EventType) String() string { return enumName(eventTypes, int32(t)) }

// MarshalJSON writes the name.
func (t FileType) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }

// MarshalJSON writes the name.
func (t EventType) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }

func enumName(names []string, n int32) string {
	if n >= 0 && int(n) < len(names) {
		return names[n]
	}
	return strconv.Itoa(int(n))
}
