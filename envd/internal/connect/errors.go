// Package connect speaks the Connect RPC protocol over HTTP/1.1: unary calls,
// server streams and client streams, in JSON and in protobuf.
package connect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"syscall"
)

// Code is a Connect error code as it appears on the wire.
type Code string

// The codes of the protocol.
const (
	Canceled           Code = "canceled"
	Unknown            Code = "unknown"
	InvalidArgument    Code = "invalid_argument"
	DeadlineExceeded   Code = "deadline_exceeded"
	NotFound           Code = "not_found"
	AlreadyExists      Code = "already_exists"
	PermissionDenied   Code = "permission_denied"
	ResourceExhausted  Code = "resource_exhausted"
	FailedPrecondition Code = "failed_precondition"
	Aborted            Code = "aborted"
	OutOfRange         Code = "out_of_range"
	Unimplemented      Code = "unimplemented"
	Internal           Code = "internal"
	Unavailable        Code = "unavailable"
	DataLoss           Code = "data_loss"
	Unauthenticated    Code = "unauthenticated"
)

var httpStatus = map[Code]int{
	Canceled:           499,
	Unknown:            http.StatusInternalServerError,
	InvalidArgument:    http.StatusBadRequest,
	DeadlineExceeded:   http.StatusGatewayTimeout,
	NotFound:           http.StatusNotFound,
	AlreadyExists:      http.StatusConflict,
	PermissionDenied:   http.StatusForbidden,
	ResourceExhausted:  http.StatusTooManyRequests,
	FailedPrecondition: http.StatusBadRequest,
	Aborted:            http.StatusConflict,
	OutOfRange:         http.StatusBadRequest,
	Unimplemented:      http.StatusNotImplemented,
	Internal:           http.StatusInternalServerError,
	Unavailable:        http.StatusServiceUnavailable,
	DataLoss:           http.StatusInternalServerError,
	Unauthenticated:    http.StatusUnauthorized,
}

// HTTPStatus is the status a unary call answers with for this code.
func (c Code) HTTPStatus() int {
	if status, ok := httpStatus[c]; ok {
		return status
	}
	return http.StatusInternalServerError
}

// Error is an RPC error: a code of the protocol and a text for a person.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
	// Reason is our extension: what a code alone does not tell.
	Reason string `json:"reason,omitempty"`
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// Reasons why a command cannot start, as shells tell them apart: 127 and 126.
const (
	CommandNotFound      = "command_not_found"
	CommandNotExecutable = "command_not_executable"
)

// What a caller can do about an exhausted resource: send or ask for less, or
// free some space. Without a reason the same call may succeed later.
const (
	TooLarge = "too_large"
	NoSpace  = "no_space"
)

// TooLargef is a request or an answer over a fixed limit.
func TooLargef(format string, args ...any) *Error {
	e := Errorf(ResourceExhausted, format, args...)
	e.Reason = TooLarge
	return e
}

// Because is an invalid argument with its reason.
func Because(reason, format string, args ...any) *Error {
	e := Errorf(InvalidArgument, format, args...)
	e.Reason = reason
	return e
}

// Errorf makes an Error.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// AsError gives any error its code. Errors of the operating system keep their
// meaning; what is left is internal.
func AsError(err error) *Error {
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	e := &Error{Code: codeOf(err), Message: err.Error()}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		e.Reason = NoSpace
	}
	return e
}

func codeOf(err error) Code {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, fs.ErrNotExist):
		return NotFound
	case errors.Is(err, syscall.ELOOP):
		return FailedPrecondition
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENAMETOOLONG):
		return InvalidArgument
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.ENOMEM):
		return ResourceExhausted
	case errors.Is(err, fs.ErrPermission):
		return PermissionDenied
	case errors.Is(err, fs.ErrExist):
		return AlreadyExists
	}
	return Internal
}

// WriteError answers a unary call (or any request before its stream began).
func WriteError(w http.ResponseWriter, err error) {
	e := AsError(err)
	body, _ := json.Marshal(e)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Code.HTTPStatus())
	_, _ = w.Write(body)
}
