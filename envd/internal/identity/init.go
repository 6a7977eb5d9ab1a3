package identity

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"time"
)

const (
	maxInit    = 4 << 20
	maxEntropy = 512
)

// Request is the body of /init. Every field is optional; a field that is
// present replaces what was there.
type Request struct {
	EnvVars        *map[string]string `json:"envVars"`
	AccessToken    *string            `json:"accessToken"`
	Timestamp      *time.Time         `json:"timestamp"`
	DefaultUser    *string            `json:"defaultUser"`
	DefaultWorkdir *string            `json:"defaultWorkdir"`
	Entropy        *string            `json:"entropy"`
	Hostname       *string            `json:"hostname"`
	MachineID      *string            `json:"machineId"`
	BootID         *string            `json:"bootId"`
	// Restored says that this machine was restored from a memory snapshot: the
	// connections it remembers are dead and are closed at once.
	Restored bool `json:"restored"`

	// Known to the protocol and refused here, so that nobody relies on them.
	HyperloopIP  *string           `json:"hyperloopIP"`
	VolumeMounts []json.RawMessage `json:"volumeMounts"`
	CABundle     *string           `json:"caBundle"`

	entropy []byte
}

// HTTPError is an error of the plain HTTP endpoints.
type HTTPError struct {
	Status  int
	Message string
}

func (e *HTTPError) Error() string { return e.Message }

func badRequest(format string, args ...any) error {
	return &HTTPError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

var (
	hostnameForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*$`)
	machineForm  = regexp.MustCompile(`^[0-9a-f]{32}$`)
	bootForm     = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
)

// ParseRequest reads and checks a body. An empty body is an empty request.
func ParseRequest(body io.Reader) (*Request, error) {
	data, err := io.ReadAll(io.LimitReader(body, maxInit+1))
	if err != nil {
		return nil, badRequest("cannot read the request: %v", err)
	}
	if len(data) > maxInit {
		return nil, badRequest("the request is over the limit of %d bytes", maxInit)
	}
	req := &Request{}
	if len(strings.TrimSpace(string(data))) > 0 {
		dec := json.NewDecoder(strings.NewReader(string(data)))
		dec.DisallowUnknownFields()
		if err := dec.Decode(req); err != nil {
			return nil, badRequest("the request is not a valid /init body: %v", err)
		}
	}
	return req, req.check()
}

func set(s *string) bool { return s != nil && *s != "" }

func (r *Request) check() error {
	switch {
	case set(r.HyperloopIP):
		return badRequest("hyperloopIP is not supported")
	case len(r.VolumeMounts) > 0:
		return badRequest("volumeMounts is not supported")
	case set(r.CABundle):
		return badRequest("caBundle is not supported")
	case set(r.Hostname) && (len(*r.Hostname) > 64 || !hostnameForm.MatchString(*r.Hostname)):
		return badRequest("hostname %q is not a host name of at most 64 characters", *r.Hostname)
	case set(r.MachineID) && !machineForm.MatchString(*r.MachineID):
		return badRequest("machineId %q is not 32 lower-case hex digits", *r.MachineID)
	case set(r.BootID) && !bootForm.MatchString(*r.BootID):
		return badRequest("bootId %q is not a lower-case UUID", *r.BootID)
	}
	if r.EnvVars != nil {
		for key, value := range *r.EnvVars {
			if key == "" || strings.ContainsAny(key, "=\x00") || strings.ContainsRune(value, 0) {
				return badRequest("environment variable %q cannot be passed to a process", key)
			}
		}
	}
	if !set(r.Entropy) {
		return nil
	}
	raw, err := base64.StdEncoding.DecodeString(*r.Entropy)
	if err != nil || len(raw) > maxEntropy {
		return badRequest("entropy is not base64 of at most %d bytes", maxEntropy)
	}
	r.entropy = raw
	return nil
}

// Apply does what the request asks, in the order in which it matters: nothing
// may draw randomness or read the clock before both are right. Whatever the
// machine refuses is logged and does not stop the rest.
func (s *State) Apply(req *Request) error {
	s.applying.Lock()
	defer s.applying.Unlock()
	if err := s.authorize(req); err != nil {
		return err
	}
	s.applyMachine(req)
	s.mu.Lock()
	defer s.mu.Unlock()
	if req.EnvVars != nil {
		s.env = *req.EnvVars
		if s.env == nil {
			s.env = map[string]string{}
		}
	}
	if set(req.DefaultUser) {
		s.user = *req.DefaultUser
	}
	if req.DefaultWorkdir != nil {
		s.workdir = *req.DefaultWorkdir
	}
	if set(req.AccessToken) {
		s.token = *req.AccessToken
	}
	return nil
}

func (s *State) authorize(req *Request) error {
	if !s.HasToken() {
		return nil
	}
	if !set(req.AccessToken) {
		return &HTTPError{http.StatusUnauthorized, "an access token is set: /init must carry the same one"}
	}
	if !s.TokenMatches(*req.AccessToken) {
		return &HTTPError{http.StatusConflict, "a different access token is already set"}
	}
	return nil
}

func (s *State) applyMachine(req *Request) {
	if len(req.entropy) > 0 {
		s.try("entropy", func() error { return addEntropy(req.entropy) })
	}
	if req.Timestamp != nil {
		s.try("clock", func() error { return setClock(*req.Timestamp) })
	}
	if boot := bootID(req); boot != "" {
		s.boot = s.remember(s.boot, boot)
		s.try("boot id", func() error { return coverFile(bootIDPath, "boot_id", boot+"\n", false) })
	}
	if set(req.Hostname) {
		s.hostname = s.remember(s.hostname, *req.Hostname)
		s.try("hostname", func() error { return setHostname(*req.Hostname) })
	}
	if set(req.MachineID) {
		s.machine = s.remember(s.machine, *req.MachineID)
		s.try("machine id", func() error { return coverFile(machineIDPath, "machine-id", *req.MachineID+"\n", true) })
	}
}

func (s *State) remember(old, value string) string {
	if s.HostTest {
		return value
	}
	return old
}

func (s *State) try(what string, f func() error) {
	if s.HostTest {
		return
	}
	if err := f(); err != nil {
		s.Log("cannot set the %s: %v", what, err)
	}
}

// Info is what /aenv/info tells about the identity.
func (s *State) Info() (boot, hostname, machine string) {
	s.applying.Lock()
	defer s.applying.Unlock()
	boot, machine = readLine(bootIDPath), readLine(machineIDPath)
	hostname, _ = os.Hostname()
	for _, pair := range []struct{ real, told *string }{
		{&boot, &s.boot}, {&hostname, &s.hostname}, {&machine, &s.machine},
	} {
		if *pair.told != "" {
			*pair.real = *pair.told
		}
	}
	return boot, hostname, machine
}

func readLine(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

func bootID(req *Request) string {
	if set(req.BootID) {
		return *req.BootID
	}
	if len(req.entropy) == 0 {
		return ""
	}
	// Not the entropy itself: the boot id is readable by everybody.
	sum := derive("aenv boot id", req.entropy)
	sum[6], sum[8] = sum[6]&0x0f|0x40, sum[8]&0x3f|0x80
	h := hex.EncodeToString(sum[:16])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
