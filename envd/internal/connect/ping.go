package connect

import (
	"strconv"
	"time"
)

const (
	defaultPing = 90 * time.Second
	minPing     = time.Second
)

// PingInterval is how often a stream that has nothing to say should say so
// (Keepalive-Ping-Interval, in seconds).
func (c *Call) PingInterval() (time.Duration, error) {
	text := c.Header.Get("Keepalive-Ping-Interval")
	if text == "" {
		return defaultPing, nil
	}
	seconds, err := strconv.ParseInt(text, 10, 32)
	if err != nil || seconds < 0 {
		return 0, Errorf(InvalidArgument, "Keepalive-Ping-Interval %q is not a number of seconds", text)
	}
	if d := time.Duration(seconds) * time.Second; d >= minPing {
		return d, nil
	}
	return defaultPing, nil
}
