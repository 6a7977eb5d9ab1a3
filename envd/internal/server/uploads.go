package server

import (
	"io"
	"net/http"
	"time"
)

const (
	// maxUnread is how much of a refused body is read on; a caller that sends more loses the reason.
	maxUnread = 4 << 30
	// unreadTime is how long that may take.
	unreadTime = 60 * time.Second
)

// upload is a call with a body of any size. One that is refused in the middle of
// it (a full disk, say) is read to its end all the same: most clients read no
// answer before they have sent everything, and a connection that is closed while
// they send takes the answer with it, so they would take the machine for dead.
func upload(handle http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		handle(w, r)
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(unreadTime))
		_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, maxUnread))
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	}
}
