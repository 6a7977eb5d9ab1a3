"""Every error this project raises on purpose, as one typed tree.

Each class fixes four facts that callers act on: a stable ``code``, the process ``exit_code``, the
``http_status``, and whether a retry of the very same call may succeed. Each instance adds what failed and
what to do about it. ``docs/errors.md`` is generated from this module.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import ClassVar


class AenvError(Exception):
    """Base of all errors: ``message`` says what failed, on which object and why; ``fix`` says what to do."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 70  # sysexits(3): internal software error
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class InvalidInput(AenvError):
    """The caller's argument, file or request is malformed or refers to an impossible combination."""

    code, exit_code, http_status = "invalid_input", 64, 400


class CommandNotFound(InvalidInput):
    """The program to run does not exist; the exit code is that of a shell."""

    code, exit_code = "command_not_found", 127


class CommandNotExecutable(InvalidInput):
    """The program to run may not be executed, or its working directory cannot be entered."""

    code, exit_code = "command_not_executable", 126


class NotFound(AenvError):
    """The named snapshot, version, tag, sandbox or file does not exist."""

    code, exit_code, http_status = "not_found", 66, 404


class SandboxKilled(NotFound):
    """Somebody killed the sandbox while this was done with it, or while it was being started."""

    code = "sandbox_killed"


class Conflict(AenvError):
    """The object is in a state, or already has a value, that forbids the call."""

    code, exit_code, http_status = "conflict", 65, 409


class Unsupported(AenvError):
    """This driver, store or build of aenv cannot do that; nothing was changed."""

    code, exit_code, http_status = "unsupported", 69, 501


class DriverUnavailable(AenvError):
    """No driver (or not the one asked for) works on this machine."""

    code, exit_code, http_status = "driver_unavailable", 69, 503


class MissingDependency(AenvError):
    """A program or file of the host that this needs is not installed."""

    code, exit_code, http_status = "missing_dependency", 69, 503


class RestoreIncompatible(AenvError):
    """A memory snapshot cannot be right on this driver, VMM, CPU or kernel; no machine was touched."""

    code, exit_code, http_status = "restore_incompatible", 65, 409


class SandboxDead(AenvError):
    """The machine or its daemon is gone: this is not the exit of a command."""

    code, exit_code, http_status = "sandbox_dead", 72, 502


class BootFailed(SandboxDead):
    """The machine never became ready; the message ends with its last console lines."""

    code, exit_code = "boot_failed", 71


class TimeOver(SandboxDead):
    """The sandbox has used up the wall clock it was given (max seconds); its machine was ended."""

    code, http_status = "time_over", 504


class CommandTimeout(AenvError):
    """A command or a wait ran past its time limit and was killed."""

    code, exit_code, http_status = "command_timeout", 124, 504


class CommandFailed(AenvError):
    """A command exited with another code than 0, and the caller had asked for an error in that case."""

    code, exit_code, http_status = "command_failed", 1, 422


class HookFailed(AenvError):
    """A hook (`on_restore`, `on_fork`, `on_pause`) did not exit with 0 in time; the message has its last lines."""

    code, exit_code, http_status = "hook_failed", 1, 422


class Unauthenticated(AenvError):
    """The access token or API key is missing or wrong."""

    code, exit_code, http_status = "unauthenticated", 77, 401


class Untrusted(AenvError):
    """The snapshot has no valid signature of a key that is required; nothing of it was used."""

    code, exit_code, http_status = "untrusted", 77, 403


class ProtocolError(AenvError):
    """The peer (guest daemon, VMM, store) sent something outside its protocol."""

    code, exit_code, http_status = "protocol_error", 76, 502


class CorruptData(AenvError):
    """Stored bytes do not match their digest or form; the object is named and was not used."""

    code, exit_code, http_status = "corrupt_data", 74, 500


class StoreUnavailable(AenvError):
    """The store did not answer, or answered with a passing fault."""

    code, exit_code, http_status, retryable = "store_unavailable", 75, 503, True


class NoSpace(AenvError):
    """A disk is full; what had been committed before is intact."""

    code, exit_code, http_status = "no_space", 73, 507


class HostRefused(AenvError):
    """The operating system of this host refused a call on a file; the message names both."""

    code, exit_code = "host_refused", 78


class LimitReached(AenvError):
    """A limit of the sandbox or the node (processes, memory, sandboxes) is used up."""

    code, exit_code, http_status, retryable = "limit_reached", 75, 429, True


class TooLarge(AenvError):
    """What was sent or asked for is over a fixed limit of size or number; the message names it."""

    code, exit_code, http_status = "too_large", 65, 413


class NodeUnavailable(AenvError):
    """The node process could not be started or reached."""

    code, exit_code, http_status, retryable = "node_unavailable", 75, 503, True


class RecipeError(InvalidInput):
    """The recipe is wrong; the message starts with file:line:column."""

    code = "recipe_error"


class BaseUnavailable(AenvError):
    """The base image of a recipe could not be fetched or built."""

    code, exit_code, http_status = "base_unavailable", 68, 502


class StepFailed(AenvError):
    """A build step's command failed or a verify did not hold; the message has its last lines."""

    code, exit_code, http_status = "step_failed", 1, 422
    #: Whether its command did it, by an exit code or by taking too long: another try may hold.
    by_command = False


class Interrupted(AenvError):
    """Stopped by the user; what the call had started was ended. Of a signal the code is 128 and its number."""

    code, exit_code, http_status = "interrupted", 130, 499


def all_errors() -> Iterator[type[AenvError]]:
    """Every error class, the base first, then depth first in order of definition."""
    pending: list[type[AenvError]] = [AenvError]
    while pending:
        cls = pending.pop(0)
        yield cls
        pending[:0] = cls.__subclasses__()


def from_os(error: OSError, what: str = "") -> AenvError:
    """The error for a call that the operating system refused: what was done, to which file, why, and a fix."""
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    reason = error.strerror or str(error) or type(error).__name__
    message = ": ".join(part for part in (what, " -> ".join(paths), reason) if part)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return NoSpace(message, fix="free some space there; what had been committed is intact")
        case errno.ENOENT:
            fix = "make it, or give another path (AENV_HOME says where aenv keeps its own files)"
            return NotFound(message, fix=fix)
        case errno.EEXIST | errno.ENOTDIR | errno.EISDIR | errno.ENOTEMPTY:
            fix = "remove what is in the way, or give another path (AENV_HOME says where aenv keeps its own files)"
            return Conflict(message, fix=fix)
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return HostRefused(message, fix="give a path that this user may write, or run as one who may")
    return HostRefused(message, fix="AENV_DEBUG=1 shows where it happened")


def from_wire(code: str, message: str, fix: str = "") -> AenvError:
    """The error that a peer sent as ``code`` and ``message``; an unknown code becomes ``AenvError``."""
    for cls in all_errors():
        if cls.code == code:
            return cls(message, fix=fix)
    return AenvError(message, fix=fix)
