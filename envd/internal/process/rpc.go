package process

import (
	"encoding/json"
	"fmt"
	"strconv"

	"aenv/envd/internal/connect"
)

// The messages of process.Process: names in JSON, numbers in protobuf.

// Config is what to run.
type Config struct {
	Cmd  string            `json:"cmd" pb:"1"`
	Args []string          `json:"args,omitempty" pb:"2"`
	Envs map[string]string `json:"envs,omitempty" pb:"3"`
	Cwd  *string           `json:"cwd,omitempty" pb:"4"`
}

// Size is a terminal size.
type Size struct {
	Cols connect.Uint32 `json:"cols" pb:"1"`
	Rows connect.Uint32 `json:"rows" pb:"2"`
}

// PTY asks for a terminal.
type PTY struct {
	Size *Size `json:"size" pb:"1"`
}

// Selector names a process by pid or tag.
type Selector struct {
	Pid *connect.Uint32 `json:"pid" pb:"1"`
	Tag *string         `json:"tag" pb:"2"`
}

// Input is bytes for one of the two kinds of input.
type Input struct {
	Stdin *connect.Bytes `json:"stdin" pb:"1"`
	Pty   *connect.Bytes `json:"pty" pb:"2"`
}

// StartRequest starts a process.
type StartRequest struct {
	Process *Config `json:"process" pb:"1"`
	Pty     *PTY    `json:"pty" pb:"2"`
	Tag     *string `json:"tag" pb:"3"`
	Stdin   *bool   `json:"stdin" pb:"4"`
}

// SelectRequest is the request of Connect and CloseStdin.
type SelectRequest struct {
	Process *Selector `json:"process" pb:"1"`
}

// UpdateRequest resizes a terminal.
type UpdateRequest struct {
	Process *Selector `json:"process" pb:"1"`
	Pty     *PTY      `json:"pty" pb:"2"`
}

// InputRequest sends input once.
type InputRequest struct {
	Process *Selector `json:"process" pb:"1"`
	Input   *Input    `json:"input" pb:"2"`
}

// StreamInputRequest is one message of the input stream.
type StreamInputRequest struct {
	Start     *SelectRequest `json:"start" pb:"1"`
	Data      *InputRequest  `json:"data" pb:"2"`
	Keepalive *Empty         `json:"keepalive" pb:"3"`
}

// SignalRequest sends a signal.
type SignalRequest struct {
	Process *Selector `json:"process" pb:"1"`
	Signal  Signal    `json:"signal" pb:"2"`
}

// Signal is the enum of the protocol; its numbers are those of Linux.
type Signal int32

// UnmarshalJSON accepts the name, the number, and keeps an unknown name as -1.
func (s *Signal) UnmarshalJSON(data []byte) error {
	var text string
	if json.Unmarshal(data, &text) != nil {
		text = string(data)
	}
	switch text {
	case "SIGNAL_SIGTERM":
		*s = 15
	case "SIGNAL_SIGKILL":
		*s = 9
	case "SIGNAL_UNSPECIFIED", "null":
		*s = 0
	default:
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			n = -1
		}
		*s = Signal(n)
	}
	return nil
}

// Empty is a reply that says only that it worked.
type Empty struct{}

// ListResponse lists what runs.
type ListResponse struct {
	Processes []Info `json:"processes" pb:"1"`
}

// Info describes a running process.
type Info struct {
	Config Config  `json:"config" pb:"1"`
	Pid    uint32  `json:"pid" pb:"2"`
	Tag    *string `json:"tag,omitempty" pb:"3"`
}

// EventMessage carries one event of a stream.
type EventMessage struct {
	Event Event `json:"event" pb:"1"`
}

// Event has exactly one field set.
type Event struct {
	Start     *StartEvent `json:"start,omitempty" pb:"1"`
	Data      *DataEvent  `json:"data,omitempty" pb:"2"`
	End       *EndEvent   `json:"end,omitempty" pb:"3"`
	Keepalive *Empty      `json:"keepalive,omitempty" pb:"4"`
}

// StartEvent comes first.
type StartEvent struct {
	Pid uint32 `json:"pid" pb:"1"`
}

// DataEvent has exactly one field set.
type DataEvent struct {
	Stdout []byte `json:"stdout,omitempty" pb:"1"`
	Stderr []byte `json:"stderr,omitempty" pb:"2"`
	Pty    []byte `json:"pty,omitempty" pb:"3"`
}

// EndEvent comes last, once.
type EndEvent struct {
	ExitCode int32   `json:"exitCode" pb:"1,zigzag"`
	Exited   bool    `json:"exited" pb:"2"`
	Status   string  `json:"status" pb:"3"`
	Error    *string `json:"error,omitempty" pb:"4"`
}

func (s *Selector) String() string {
	switch {
	case s == nil:
		return "process (no selector)"
	case s.Pid != nil:
		return fmt.Sprintf("process with pid %d", *s.Pid)
	case s.Tag != nil:
		return fmt.Sprintf("process with tag %q", *s.Tag)
	}
	return "process (empty selector)"
}
