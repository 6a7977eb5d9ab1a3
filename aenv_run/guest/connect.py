"""The Connect protocol with JSON, as the daemon speaks it: envelopes, error codes, transport faults.

Source: connectrpc.com/docs/protocol. An envelope is one byte of flags, four of big-endian length, payload.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from aenv_run.errors import (
    AenvError,
    CommandNotExecutable,
    CommandNotFound,
    CommandTimeout,
    Conflict,
    InvalidInput,
    LimitReached,
    NoSpace,
    NotFound,
    ProtocolError,
    SandboxDead,
    TooLarge,
    Unauthenticated,
    Unsupported,
)
from aenv_run.later import later

if TYPE_CHECKING:
    import httpx
else:
    httpx = later("httpx")

M = TypeVar("M", bound=BaseModel)

END_OF_STREAM = 0x02
#: The daemon never sends more in one message (output chunks are 32 KiB); a guest that does is lying.
MAX_MESSAGE_BYTES = 16 << 20

_BY_CODE: dict[str, type[AenvError]] = {
    "invalid_argument": InvalidInput,
    "out_of_range": InvalidInput,
    "not_found": NotFound,
    "already_exists": Conflict,
    "failed_precondition": Conflict,
    "aborted": Conflict,
    "permission_denied": InvalidInput,
    "unauthenticated": Unauthenticated,
    "unimplemented": Unsupported,
    "deadline_exceeded": CommandTimeout,
    "resource_exhausted": LimitReached,
    "unavailable": SandboxDead,
}
#: The daemon's extension of an error: of what kind it is.
_BY_REASON: dict[str, type[AenvError]] = {
    "command_not_found": CommandNotFound,
    "command_not_executable": CommandNotExecutable,
    "too_large": TooLarge,
    "no_space": NoSpace,
}
SILENT_FIX = "wait, in case it is only busy; else remove it: `aenv rm ID`"
_BY_STATUS: dict[int, type[AenvError]] = {
    400: InvalidInput,
    401: Unauthenticated,
    404: NotFound,
    409: Conflict,
    410: SandboxDead,  # these three are the words of a server's proxy
    429: LimitReached,
    502: SandboxDead,
    504: SandboxDead,
    501: Unsupported,
    507: NoSpace,
}


class _ErrorBody(BaseModel):
    code: str | int = ""
    message: str = ""
    reason: str = ""


class _EndOfStream(BaseModel):
    error: _ErrorBody | None = None


def envelope(message: dict[str, object]) -> bytes:
    """One data envelope around a JSON message."""
    payload = json.dumps(message).encode()
    return struct.pack(">BI", 0, len(payload)) + payload


async def messages(response: httpx.Response) -> AsyncIterator[bytes]:
    """The JSON payloads of a stream until its end envelope, whose error is raised.

    A stream that breaks off without its end is ``SandboxDead``: the daemon went away.
    """
    buffer = bytearray()
    async for chunk in response.aiter_raw():
        buffer += chunk
        while len(buffer) >= 5:
            flags, length = struct.unpack_from(">BI", buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"the sandbox's daemon announced a message of {length} bytes")
            if len(buffer) < 5 + length:
                break
            payload = bytes(buffer[5 : 5 + length])
            del buffer[: 5 + length]
            if flags & END_OF_STREAM:
                end = parse(_EndOfStream, payload)
                if end.error is not None:
                    raise error_of(end.error.code, end.error.message, end.error.reason)
                return
            yield payload
    raise SandboxDead("the sandbox's daemon broke off in the middle of an answer")


def error_of(code: str | int, message: str, reason: str = "") -> AenvError:
    """Our error for a Connect code, or for an HTTP status where the body had none."""
    status = int(code) if str(code).isdigit() else 0
    kind = _BY_REASON.get(reason) or _BY_CODE.get(str(code)) or _BY_STATUS.get(status, ProtocolError)
    return kind(message[:2000] or f"the sandbox's daemon answered {code}")


async def raise_for_error(response: httpx.Response) -> None:
    """Raise the error that a non-2xx reply carries."""
    if response.is_success:
        return
    body = await response.aread()
    try:
        error = _ErrorBody.model_validate_json(body[:65536])
    except ValidationError:
        error = _ErrorBody(message=body[:200].decode(errors="replace"))
    raise error_of(error.code or response.status_code, error.message, error.reason)


@contextmanager
def transport_faults(what: str) -> Iterator[None]:
    """Turn faults of the connection into ``SandboxDead``: they are never the result of a command."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise SandboxDead(f"the sandbox's daemon did not answer in time ({what})", fix=SILENT_FIX) from error
    except httpx.TransportError as error:
        raise SandboxDead(
            f"the sandbox's daemon is unreachable ({what}): {error or type(error).__name__}"
        ) from error


def parse(model: type[M], payload: bytes) -> M:
    """A reply as its model, or ``ProtocolError``."""
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        raise ProtocolError(f"the sandbox's daemon sent a malformed {model.__name__}: {error}") from error
