package process

import (
	"encoding/json"
	"fmt"
	"strconv"

	"aenv/envd/internal/connect"
)

// The messages of process.Process, in the JSON mapping of protobuf.

// Config is what to run.
type Config struct {
	Cmd  string            `json:"cmd"`
	Args []string          `json:"args,omitempty"`
	Envs map[string]string `json:"envs,omitempty"`
	Cwd  *string           `json:"cwd,omitempty"`
}

// Size is a terminal size.
type Size struct {
	Cols connect.Uint32 `json:"cols"`
	Rows connect.Uint32 `json:"rows"`
}

// PTY asks for a terminal.
type PTY struct {
	Size *Size `json:"size"`
}

// Selector names a process by pid or tag.
type Selector struct {
	Pid *connect.Uint32 `json:"pid"`
	Tag *string         `json:"tag"`
}

// Input is bytes for one of the two kinds of input.
type Input struct {
	Stdin *connect.Bytes `json:"stdin"`
	Pty   *connect.Bytes `json:"pty"`
}

// StartRequest starts a process.
type StartRequest struct {
	Process *Config `json:"process"`
	Pty     *PTY    `json:"pty"`
	Tag     *string `json:"tag"`
	Stdin   *bool   `json:"stdin"`
}

// SelectRequest is the request of Connect and CloseStdin.
type SelectRequest struct {
	Process *Selector `json:"process"`
}

// UpdateRequest resizes a terminal.
type UpdateRequest struct {
	Process *Selector `json:"process"`
	Pty     *PTY      `json:"pty"`
}

// InputRequest sends input once.
type InputRequest struct {
	Process *Selector `json:"process"`
	Input   *Input    `json:"input"`
}

// StreamInputRequest is one message of the input stream.
type StreamInputRequest struct {
	Start     *SelectRequest  `json:"start"`
	Data      *InputRequest   `json:"data"`
	Keepalive json.RawMessage `json:"keepalive"`
}

// SignalRequest sends a signal.
type SignalRequest struct {
	Process *Selector `json:"process"`
	Signal  Signal    `json:"signal"`
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
	Processes []Info `json:"processes"`
}

// Info describes a running process.
type Info struct {
	Config Config  `json:"config"`
	Pid    uint32  `json:"pid"`
	Tag    *string `json:"tag,omitempty"`
}

// EventMessage carries one event of a stream.
type EventMessage struct {
	Event Event `json:"event"`
}

// Event has exactly one field set.
type Event struct {
	Start     *StartEvent `json:"start,omitempty"`
	Data      *DataEvent  `json:"data,omitempty"`
	End       *EndEvent   `json:"end,omitempty"`
	Keepalive *Empty      `json:"keepalive,omitempty"`
}

// StartEvent comes first.
type StartEvent struct {
	Pid uint32 `json:"pid"`
}

// DataEvent has exactly one field set.
type DataEvent struct {
	Stdout []byte `json:"stdout,omitempty"`
	Stderr []byte `json:"stderr,omitempty"`
	Pty    []byte `json:"pty,omitempty"`
}

// EndEvent comes last, once.
type EndEvent struct {
	ExitCode int32   `json:"exitCode"`
	Exited   bool    `json:"exited"`
	Status   string  `json:"status"`
	Error    *string `json:"error,omitempty"`
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
