package identity

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"strconv"
	"time"
)

// Why a signed request is refused.
var (
	ErrNoSignature  = errors.New("neither the X-Access-Token header nor a signature is there")
	ErrSignature    = errors.New("the signature is wrong")
	ErrExpired      = errors.New("the signature has expired")
	ErrNoExpiration = errors.New("signature_expiration is not a number of seconds")
)

// Signed is what a signature vouches for: one operation ("read" or "write") on
// one path as one user ("" for the default one), perhaps until a time in Unix
// seconds ("" for ever).
type Signed struct {
	Path, Operation, User, Expiration string
	Signature                         string
}

// CheckSignature lets a request in that carries no token but a signature by it.
func (s *State) CheckSignature(r Signed, now time.Time) error {
	if r.Signature == "" {
		return ErrNoSignature
	}
	s.mu.Lock()
	token := s.token
	s.mu.Unlock()
	text := r.Path + ":" + r.Operation + ":" + r.User + ":" + token
	var until int64
	if r.Expiration != "" {
		var err error
		if until, err = strconv.ParseInt(r.Expiration, 10, 64); err != nil {
			return ErrNoExpiration
		}
		text += ":" + strconv.FormatInt(until, 10)
	}
	sum := sha256.Sum256([]byte(text))
	want := "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
	switch {
	case token == "" || subtle.ConstantTimeCompare([]byte(want), []byte(r.Signature)) != 1:
		return ErrSignature
	case r.Expiration != "" && until < now.Unix():
		return ErrExpired
	}
	return nil
}
