"""The store of a server's repository, over HTTP or HTTPS with an API key."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from pydantic import ValidationError

from aenv_run.credentials import ServerAddress
from aenv_run.errors import CorruptData, InvalidInput, ProtocolError, StoreUnavailable
from aenv_run.store.posix_files import as_key, opened_source
from aenv_run.store.protocol import KeyInfo, StoreKey, Stray
from aenv_run.store.remote_link import PAUSES_S, StoreLink
from aenv_run.store.remote_wire import (
    MAX_PIECE_BYTES,
    PIECE_BYTES,
    About,
    Done,
    Found,
    Row,
    StrayRow,
    Strays,
    frames,
)

if TYPE_CHECKING:
    import httpx
    from _typeshed import WriteableBuffer

MAX_STRAYS_BYTES = 16 << 20
MAX_LINE_BYTES = 64 << 10


class RemoteStore:
    """See ``Store``. What reads is asked again when the connection breaks, what writes only if nothing was sent.

    A write whose answer was lost is ``StoreUnavailable``: whether it was done is not known.
    """

    def __init__(self, server: ServerAddress, *, pauses_s: tuple[float, ...] = PAUSES_S) -> None:
        self._link = StoreLink(server, pauses_s)
        self._about: About | None = None

    @property
    def conditional(self) -> bool:
        """See ``Store``."""
        return self.about().conditional

    def about(self) -> About:
        """What the server says of its store; asked once."""
        if self._about is None:
            self._about = self._link.ask(About, "GET", "/about")
        return self._about

    # Writing

    def require_writable(self) -> None:
        """See ``Store``."""
        self._link.call("POST", "/writable", again=True)

    def put_file(self, key: StoreKey, source: Path, *, consume: bool = False) -> bool:
        """See ``Store``. Always a copy."""
        with opened_source(source) as descriptor, os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
            before = os.fstat(descriptor)
            if self.stat(key) is not None:
                return False

            def unchanged(size_bytes: int) -> None:
                now = os.fstat(descriptor)
                if (now.st_size, now.st_mtime_ns) != (
                    before.st_size,
                    before.st_mtime_ns,
                ) or now.st_size != size_bytes:
                    raise InvalidInput(
                        f"{source} was written while it was stored", fix="store it when it is complete"
                    )

            pieces = frames(io.BufferedReader(file, PIECE_BYTES), unchanged)
            return self._link.ask(Done, "PUT", "/file", {"key": key}, pieces).done

    def put_new(self, key: StoreKey, data: bytes) -> bool:
        """See ``Store``."""
        return self._link.ask(Done, "PUT", "/object", {"key": key}, data).done

    def swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        """See ``Store``."""
        params: dict[str, str | int] = {"key": key}
        if expected is not None:
            params["expected"] = len(expected)
        return self._link.ask(Done, "POST", "/swap", params, (expected or b"") + data).done

    def delete(self, key: StoreKey) -> None:
        """See ``Store``. To remove it twice is as once."""
        self._link.call("DELETE", "/object", {"key": key}, again=True)

    # Reading

    def read(self, key: StoreKey, *, limit_bytes: int) -> bytes:
        """See ``Store``."""
        limit = min(limit_bytes, MAX_PIECE_BYTES)
        data = self._link.call("GET", "/object", {"key": key, "limit": limit_bytes}, limit_bytes=limit)
        if len(data) > limit_bytes:
            raise CorruptData(f"{key} has more than {limit_bytes} bytes")
        return data

    def read_range(self, key: StoreKey, offset: int, length: int) -> bytes:
        """See ``Store``."""
        if offset < 0 or length < 0:
            raise InvalidInput(f"range {offset}+{length} of {key} is negative")
        parts: builtins.list[bytes] = []
        for start in range(offset, offset + max(length, 1), MAX_PIECE_BYTES):
            size = min(MAX_PIECE_BYTES, offset + length - start)
            params: dict[str, str | int] = {"key": key, "offset": start, "length": size}
            parts.append(self._link.call("GET", "/range", params, limit_bytes=size))
            if len(parts[-1]) != size:
                raise CorruptData(f"{key} ends before the end of the range {offset}+{length}")
        return b"".join(parts)

    @contextmanager
    def open(self, key: StoreKey) -> Iterator[BinaryIO]:
        """See ``Store``. A connection that breaks while it is read is ``StoreUnavailable``."""
        with self._link.stream("/stream", {"key": key}) as response:
            yield io.BufferedReader(_Reader(self._link, key, response), PIECE_BYTES)

    def stat(self, key: StoreKey) -> KeyInfo | None:
        """See ``Store``."""
        found = self._link.ask(Found, "GET", "/stat", {"key": key})
        return None if found.size_bytes is None else KeyInfo(key, found.size_bytes, found.modified_s)

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """See ``Store``. It comes while it is read."""
        count = 0
        with self._link.stream("/list", {"prefix": prefix}) as response:
            for line in self._lines(prefix, response):
                row = self._row(line)
                if row.end is not None:
                    if row.end != count:
                        raise ProtocolError(f"{self._link.place} sent {count} of {row.end} keys")
                    return
                key = as_key(row.key)
                if key is None or not key.startswith(prefix):
                    raise ProtocolError(f"{self._link.place} listed what is no key that begins with {prefix!r}")
                count += 1
                yield KeyInfo(key, row.size_bytes, row.modified_s)
        raise StoreUnavailable(f"the list of {self._link.place} broke off", fix="try again")

    def _lines(self, prefix: str, response: httpx.Response) -> Iterator[bytes]:
        rest = b""
        with self._link.faults(f"listing {prefix or 'everything'}"):
            for chunk in response.iter_bytes():
                *whole, rest = (rest + chunk).split(b"\n")
                yield from whole
                if len(rest) > MAX_LINE_BYTES:
                    raise ProtocolError(f"{self._link.place} sent a line of too many bytes")

    def _row(self, line: bytes) -> Row:
        try:
            return Row.model_validate_json(line)
        except ValidationError:
            raise self._link.error_in(line) from None

    def strays(self) -> Iterator[Stray]:
        """See ``Store``."""
        answer = self._link.ask(Strays, "GET", "/strays", limit_bytes=MAX_STRAYS_BYTES)
        for row in answer.strays:
            kind: Literal["temporary", "foreign"] = "temporary" if row.kind == "temporary" else "foreign"
            yield Stray(kind, row.path, row.detail, row.modified_s)

    def clear(self, stray: Stray) -> None:
        """See ``Store``."""
        row = StrayRow(kind=stray.kind, path=stray.path, detail=stray.detail, modified_s=stray.modified_s)
        self._link.call("POST", "/clear", content=row.model_dump_json().encode())

    @property
    def has_files(self) -> bool:
        """See ``Store``."""
        return False

    def local_path(self, key: StoreKey) -> Path | None:
        """See ``Store``."""
        return None


class _Reader(io.RawIOBase):
    """The bytes of one answer; its last chunk says that all have come."""

    def __init__(self, link: StoreLink, key: StoreKey, response: httpx.Response) -> None:
        self._link, self._key = link, key
        self._pieces = response.iter_bytes()
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """As much as there is at once; 0 only at the end."""
        view = memoryview(buffer).cast("B")
        while not self._piece:
            with self._link.faults(f"reading {self._key}"):
                if (piece := next(self._pieces, None)) is None:
                    return 0
            self._piece = memoryview(piece)
        size = min(len(view), len(self._piece))
        view[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size
