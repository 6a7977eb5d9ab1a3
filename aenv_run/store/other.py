"""Stores that are only read, through fsspec: http(s), gs (Google) and az (Azure).

fsspec has an exclusive creation for some of them but no compare and swap for any, and a repository needs both: two
writers of a tag could undo each other. So nothing is written.
"""

from __future__ import annotations

import builtins
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import tenacity

from aenv_run.errors import (
    AenvError,
    CorruptData,
    InvalidInput,
    MissingDependency,
    NotFound,
    ProtocolError,
    StoreUnavailable,
    Unauthenticated,
    Unsupported,
)
from aenv_run.printable import printable
from aenv_run.store.posix_files import as_key
from aenv_run.store.protocol import KeyInfo, StoreKey, Stray

T = TypeVar("T")

#: By scheme: what Python package fsspec needs for it, and where credentials come from.
SCHEMES = {
    "http": ("aiohttp", "only what everybody may read can be read over http"),
    "https": ("aiohttp", "only what everybody may read can be read over https"),
    "gs": ("gcsfs", "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("adlfs", "AZURE_STORAGE_ACCOUNT_NAME and `az login`, or AZURE_STORAGE_ACCOUNT_KEY"),
}
_CONNECT_S, _READ_S, _TRIES = 4.0, 30.0, 4


class FileSystem(Protocol):
    """What is used of fsspec's."""

    def open(self, path: str, mode: str = "rb") -> BinaryIO:
        """A reader."""

    def info(self, path: str) -> dict[str, object]:
        """What is known of it; ``FileNotFoundError``."""

    def find(self, path: str, *, detail: bool, on_error: str) -> dict[str, dict[str, object]]:
        """All files below, by path."""

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """A range."""


def parse_place(url: str) -> str:
    """The URL in its one form; ``InvalidInput`` for what could hold a secret or leads elsewhere."""
    fix = "write SCHEME://HOST-OR-BUCKET/PREFIX, without user, password, query and fragment"
    try:
        parts = urlsplit(url)
        valid = bool(parts.hostname) and "@" not in parts.netloc and not parts.query and not parts.fragment
    except ValueError:
        valid = False
    if not valid or not re.fullmatch(r"(?:/+[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*/*", parts.path):
        raise InvalidInput("the URL of the repository cannot be read, or could hold a secret", fix=fix)
    path = "/".join(part for part in parts.path.split("/") if part)
    return f"{parts.scheme}://{parts.netloc}" + (f"/{path}" if path else "")


def open_place(place: str) -> OtherStore:
    """Of ``parse_place``. ``MissingDependency`` without the Python package for it."""
    import fsspec

    scheme = place.partition("://")[0]
    package, _ = SCHEMES[scheme]
    options: dict[str, object] = {"use_listings_cache": False, "skip_instance_cache": True}
    try:
        if package == "aiohttp":
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
            options["client_kwargs"] = {"timeout": timeout}
        filesystem = fsspec.filesystem(scheme, **options)
    except ImportError:
        raise MissingDependency(
            f"repositories at {scheme}:// need the Python package {package}", fix=f"pip install {package}"
        ) from None
    # Of http the whole URL is the path; of the others what is behind the scheme.
    return OtherStore(filesystem, place if package == "aiohttp" else place.partition("://")[2], place)


@dataclass(frozen=True)
class OtherStore:
    """See ``Store``. ``root`` is the path of the repository in ``filesystem``; ``place`` is how people name it."""

    filesystem: FileSystem
    root: str
    place: str

    @property
    def conditional(self) -> bool:
        """See ``Store``."""
        return False

    # Writing

    def require_writable(self) -> None:
        """See ``Store``."""
        self._refuse()

    def put_file(self, key: StoreKey, source: Path, *, consume: bool = False) -> bool:
        """See ``Store``: refused."""
        self._refuse()

    def put_new(self, key: StoreKey, data: bytes) -> bool:
        """See ``Store``: refused."""
        self._refuse()

    def swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        """See ``Store``: refused."""
        self._refuse()

    def delete(self, key: StoreKey) -> None:
        """See ``Store``: refused."""
        self._refuse()

    def clear(self, stray: Stray) -> None:
        """See ``Store``: refused."""
        self._refuse()

    # Reading

    def read(self, key: StoreKey, *, limit_bytes: int) -> bytes:
        """See ``Store``."""

        def whole() -> bytes:
            with self.filesystem.open(self._path(key)) as file:
                return file.read(limit_bytes + 1)

        data = self._ask(f"reading {key}", whole)
        if len(data) > limit_bytes:
            raise CorruptData(f"{key} at {self.place} has more than {limit_bytes} bytes")
        return data

    def read_range(self, key: StoreKey, offset: int, length: int) -> bytes:
        """See ``Store``."""
        if offset < 0 or length < 0:
            raise InvalidInput(f"range {offset}+{length} of {key} is negative")
        found = self.stat(key)
        if found is None:
            raise NotFound(f"{key} is not in the store {self.place}")
        if length == 0:
            return b""
        if offset + length > found.size_bytes:
            raise CorruptData(f"{key} at {self.place} ends before the end of the range {offset}+{length}")
        path, end = self._path(key), offset + length
        data = self._ask(f"reading {key}", lambda: self.filesystem.cat_file(path, offset, end))
        if len(data) > length:
            raise ProtocolError(f"{self.place} does not give ranges of files: asked for byte {offset} of {key}")
        if len(data) < length:
            raise CorruptData(f"{key} at {self.place} ends before the end of the range {offset}+{length}")
        return data

    @contextmanager
    def open(self, key: StoreKey) -> Iterator[BinaryIO]:
        """See ``Store``."""
        file = self._ask(f"reading {key}", lambda: self.filesystem.open(self._path(key)))
        with file:
            yield cast(BinaryIO, _Reader(self, key, file))

    def stat(self, key: StoreKey) -> KeyInfo | None:
        """See ``Store``. The time is 0 where the server has none."""
        try:
            found = self._ask(f"looking for {key}", lambda: self.filesystem.info(self._path(key)))
        except NotFound:
            return None
        return KeyInfo(key, _size(found), _modified_s(found)) if found.get("type", "file") == "file" else None

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """See ``Store``. Over http it is what the server's index pages link to."""
        for path, found in self._files(prefix):
            if (key := as_key(path)) is not None and key.startswith(prefix):
                if self.root.startswith("http"):  # an index has no sizes
                    if (info := self.stat(key)) is not None:
                        yield info
                else:
                    yield KeyInfo(key, _size(found), _modified_s(found))

    def strays(self) -> Iterator[Stray]:
        """See ``Store``."""
        for path, _ in self._files(""):
            if as_key(path) is None:
                yield Stray("foreign", ascii(path)[1:-1], "has a name that no object has")

    @property
    def has_files(self) -> bool:
        """See ``Store``."""
        return False

    def local_path(self, key: StoreKey) -> Path | None:
        """See ``Store``."""
        return None

    # Pieces

    def _refuse(self) -> NoReturn:
        raise Unsupported(
            f"{self.place} is only read: aenv has no compare and swap there, so two writers could undo each other",
            fix="write to a directory or an S3 store; `aenv catalog export` and `import` copy between them",
        )

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _files(self, prefix: str) -> builtins.list[tuple[str, dict[str, object]]]:
        above = posixpath.dirname(prefix)
        if above and as_key(above) is None:
            return []
        start = self._path(above) if above else self.root
        try:
            # With its slash an index page's links are relative to that folder. By itself fsspec omits what fails.
            doing = f"listing {prefix or 'everything'}"
            found = self._ask(doing, lambda: self.filesystem.find(start + "/", detail=True, on_error="raise"))
        except NotFound:
            return []
        ours = self.root.strip("/") + "/"
        rows = ((path.lstrip("/"), info) for path, info in found.items())
        return sorted(
            ((path[len(ours) :], info) for path, info in rows if path.startswith(ours)), key=lambda row: row[0]
        )

    def _ask(self, doing: str, call: Callable[[], T]) -> T:
        """``call``, again while the other side has a fault that may pass."""
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailable),
            stop=tenacity.stop_after_attempt(_TRIES),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5),
            reraise=True,
        )
        for attempt in attempts:
            with attempt, self.errors(doing):
                return call()
        raise AssertionError("unreachable")

    @contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Each of these libraries has errors of its own, none of which callers know."""
        where = f"{doing} at {self.place}"
        try:
            yield
        except AenvError:
            raise
        except FileNotFoundError as error:
            # fsspec says the same of a server that is not there, and why in the cause.
            cause = error.__cause__
            if cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) in (404, 410):
                raise NotFound(f"{where}: it is not there") from None
            raise _explained(cause, where) from error
        except PermissionError as error:
            credentials = SCHEMES.get(self.place.partition("://")[0], ("", ""))[1]
            raise Unauthenticated(f"{where}: not allowed", fix=credentials) from error
        except Exception as error:
            raise _explained(error, where) from error


class _Reader:
    """A reader whose errors are ours."""

    def __init__(self, store: OtherStore, key: StoreKey, file: BinaryIO) -> None:
        self._store, self._key, self._file = store, key, file

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes; empty at the end."""
        with self._store.errors(f"reading {self._key}"):
            return self._file.read(size)


def _explained(error: BaseException, where: str) -> AenvError:
    if (status := getattr(error, "status", None)) in (401, 403):
        return Unauthenticated(f"{where}: the server answered {status}", fix="only what all may read is read so")
    said = printable(str(error).partition("?")[0])[:200] or type(error).__name__
    return StoreUnavailable(f"{where}: {said}", fix="look whether it can be reached from here")


def _size(found: dict[str, object]) -> int:
    size = found.get("size")
    return size if isinstance(size, int) else 0


def _modified_s(found: dict[str, object]) -> float:
    for name in ("mtime", "last_modified", "updated", "created"):
        value = found.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return 0.0
