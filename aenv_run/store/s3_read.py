"""Reading an object: a stream that goes on where it broke, and exact ranges."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError

from aenv_run.errors import CorruptData, NotFound, ProtocolError, StoreUnavailable
from aenv_run.store.protocol import StoreKey
from aenv_run.store.s3_errors import is_absent, is_precondition, status_of
from aenv_run.store.s3_requests import Mark, S3Requests

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from botocore.response import StreamingBody

BROKEN = (HTTPClientError, IncompleteReadError, OSError)
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Opened:
    """An answer to GET, whose bytes have not been read yet."""

    body: StreamingBody
    size_bytes: int
    etag: str
    mark: Mark


def opened(
    requests: S3Requests, key: StoreKey, *, start: int = 0, end: int | None = None, etag: str = ""
) -> Opened:
    """From ``start``, up to but without ``end``; ``size_bytes`` is what comes. ``NotFound``, ``CorruptData``."""
    ranged = start > 0 or end is not None
    options: dict[str, str] = {}
    if ranged:
        options["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    if etag:
        options["IfMatch"] = etag
    try:
        found = requests.ask(
            f"reading {key}",
            lambda client: client.get_object(
                Bucket=requests.place.bucket,
                Key=requests.name(key),
                **options,  # type: ignore[arg-type]
            ),
            expect=lambda error: is_absent(error) or is_precondition(error) or status_of(error) == 416,
        )
    except ClientError as error:
        if is_precondition(error):
            raise StoreUnavailable(f"{key} in {requests.place} changed while it was read") from None
        if status_of(error) == 416:
            raise _ends_before(requests, key, start, end) from None
        raise NotFound(f"{key} is not in the store {requests.place}") from None
    if ranged and not found.get("ContentRange", "").startswith(f"bytes {start}-"):
        found["Body"].close()
        raise ProtocolError(f"{requests.place} does not give ranges of objects: asked for byte {start} of {key}")
    mark = Mark.of(found.get("Metadata"))
    return Opened(found["Body"], found["ContentLength"], found.get("ETag", ""), mark)


def read_range(requests: S3Requests, key: StoreKey, offset: int, length: int) -> bytes:
    """Exactly that range, in one request unless it breaks."""
    answer = opened(requests, key, start=offset, end=offset + length)
    if answer.size_bytes != length:
        answer.body.close()
        raise _ends_before(requests, key, offset, offset + length)
    with ResumingReader(requests, key, answer, start=offset) as reader:
        return reader.readall()


def small(requests: S3Requests, key: StoreKey, limit_bytes: int) -> tuple[bytes | None, Opened]:
    """All of it, or None and nothing read if it is longer than ``limit_bytes``."""
    answer = opened(requests, key)
    with ResumingReader(requests, key, answer) as reader:
        return (reader.readall() if answer.size_bytes <= limit_bytes else None), answer


def reader_of(requests: S3Requests, key: StoreKey) -> io.BufferedReader:
    """The whole object, from its start."""
    return io.BufferedReader(ResumingReader(requests, key, opened(requests, key)), _BUFFER_BYTES)


class ResumingReader(io.RawIOBase):
    """The bytes of one answer. Where the connection breaks, the rest of that very object is asked for."""

    def __init__(self, requests: S3Requests, key: StoreKey, answer: Opened, *, start: int = 0) -> None:
        self._requests, self._key, self._answer = requests, key, answer
        self._body = answer.body
        self._position, self._end = start, start + answer.size_bytes
        self._broken = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """As much as there is at once; 0 only at the end."""
        view = memoryview(buffer).cast("B")
        while view and self._position < self._end:
            try:
                data = self._body.read(min(len(view), self._end - self._position))
            except BROKEN:
                data = b""
            if data:
                view[: len(data)] = data
                self._position += len(data)
                self._broken = 0
                return len(data)
            self._resume()
        return 0

    def readall(self) -> bytes:
        """All that is left."""
        data = bytearray(self._end - self._position)
        view = memoryview(data)
        while view:
            view = view[self.readinto(view) :]
        return bytes(data)

    def close(self) -> None:
        """Drop the connection if bytes are left on it."""
        if not self.closed:
            self._body.close()
        super().close()

    def _resume(self) -> None:
        self._body.close()
        self._broken += 1
        if self._broken > self._requests.patience.tries:
            raise StoreUnavailable(
                f"reading {self._key} in {self._requests.place} was cut short {self._broken} times "
                f"one after the other; {self._end - self._position} bytes are missing",
                fix="try again; look at proxies between here and the store",
            )
        self._requests.pause(self._broken)
        rest = opened(self._requests, self._key, start=self._position, end=self._end, etag=self._answer.etag)
        self._body = rest.body


def _ends_before(requests: S3Requests, key: StoreKey, start: int, end: int | None) -> CorruptData:
    return CorruptData(
        f"{key} in {requests.place} ends before the end of the range {start}+{(end or start) - start}",
        fix="restore the object from a copy or rebuild the snapshot",
    )
