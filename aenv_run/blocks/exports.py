"""What a block server may serve, and what went wrong with it: small files in ``cache/partial``.

``EXPORT.json`` says which blob an export is and where it comes from. Whoever uses it has a hard link of that in
its own directory, so a server that is started anew still knows it, and a trim knows that it is needed. Of the same
bytes there is one ``DATA.data``, whatever repository they come from. The chunk table is a part of both names: a
manifest that names the same blob with a table of other bytes never meets them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from aenv_run.cache_limit import PARTIAL
from aenv_run.errors import AenvError, CorruptData, NotFound, from_wire
from aenv_run.paths import Home
from aenv_run.snapshot import Blob
from aenv_run.types import Model

MAX_BYTES = 64 << 10
#: What a user's hard link of an export is called.
SERVED = ".served"
#: What the note of a read that failed takes, written in place: no room is needed for it on a full disk.
UNREAD_BYTES = 4096
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}
#: Sources of the same bytes that are looked at.
MAX_ALIKE = 8


class Export(Model):
    """One blob, which has a chunk table, of one repository."""

    format: Literal["aenv.served/1"] = "aenv.served/1"
    blob: Blob
    repository: str = Field(max_length=4096)

    @model_validator(mode="after")
    def _has_a_table(self) -> Self:
        if self.blob.chunks is None:
            raise ValueError("a blob without a chunk table cannot be read by range")
        return self

    @property
    def data(self) -> str:
        """Names the bytes."""
        assert self.blob.chunks is not None
        return f"{self.blob.digest.hex}.{self.blob.chunks.hex}"

    @property
    def name(self) -> str:
        """Names the export."""
        return f"{self.data}.{hashlib.sha256(self.repository.encode()).hexdigest()[:16]}"


class Trouble(Model):
    """Why bytes of a layer could not be read, the last time that somebody wanted some."""

    code: str
    message: str
    fix: str = ""
    at_s: float

    def error(self) -> AenvError:
        """The typed error again."""
        return from_wire(self.code, self.message, self.fix)


def read_export(path: Path) -> Export | None:
    """That of a file; None when it has none."""
    try:
        with path.open("rb") as file:
            return Export.model_validate_json(file.read(MAX_BYTES))
    except (OSError, ValueError, ValidationError):
        return None


def held_exports(home: Home) -> Iterator[Path]:
    """What machines of the home have open, or had when their node died."""
    yield from home.sandboxes.glob(f"*/below/*{SERVED}")
    yield from home.staging.glob(f"**/*-below/*{SERVED}")


class Exports:
    """The files of one cache. Processes may use them at the same time."""

    def __init__(self, root: Path, holders: Callable[[], Iterable[Path]] = tuple) -> None:
        """Of the cache ``root``; ``holders`` are the files that users have, by which a lost one is put back."""
        self.directory = root / PARTIAL
        self._holders = holders

    def add(self, export: Export, holder: Path) -> None:
        """Let it be served for as long as ``holder``, a new name of its file, is there."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(export.name)
        for _ in range(5):
            if not path.exists():
                _replace(path, export.model_dump_json().encode())
            with suppress(FileNotFoundError):  # a trim was faster
                os.utime(path)
                try:
                    os.link(path, holder)
                except OSError as error:
                    if error.errno not in _CANNOT_LINK:
                        raise
                    # The cache is on another file system. A trim does not see a copy: ``find`` looks for it.
                    _replace(holder, export.model_dump_json().encode())
                return
        raise NotFound(f"{path} does not stay", fix="try again")

    def find(self, name: str) -> Export:
        """``NotFound`` unless it may be served."""
        path = self._path(name)
        found = read_export(path) or self._put_back(name)
        if found is None:
            raise NotFound(f"nothing is served as {name[:80]!r}")
        if found.name != name:
            raise CorruptData(f"{path} is that of another export")
        return found

    def _put_back(self, name: str) -> Export | None:
        """The cache may be emptied at any time, also while a machine reads."""
        for holder in self._holders():
            export = read_export(holder)
            if export is not None and export.name == name:
                with suppress(OSError):
                    self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with suppress(FileExistsError):
                        os.link(holder, self._path(name))
                return export
        return None

    def alike(self, export: Export) -> list[Export]:
        """The same bytes of other repositories, as far as they may be served too."""
        found = []
        for path in sorted(self.directory.glob(f"{export.data}.*.json"))[:MAX_ALIKE]:
            with suppress(AenvError):
                if path.stem != export.name:
                    found.append(self.find(path.stem))
        return found

    def data(self, export: Export) -> Path:
        """The file of its chunks."""
        return self.directory / f"{export.data}.data"

    def table(self, export: Export) -> Path:
        """A copy of its chunk table."""
        return self.directory / f"{export.data}.table"

    def tell(self, export: Export, error: AenvError | None) -> None:
        """Write down why it could not be read; None: it can."""
        path = self._trouble(export.data)
        if error is None:
            path.unlink(missing_ok=True)
            return
        trouble = Trouble(code=error.code, message=error.message[:4000], fix=error.fix, at_s=time.time())
        with suppress(OSError):  # the disk may be full: whoever reads gets an error all the same
            _replace(path, trouble.model_dump_json().encode())

    def trouble(self, name: str) -> Trouble | None:
        """Why the export could not be read the last time that somebody tried; None when it could."""
        try:
            with self._trouble(name.rpartition(".")[0]).open("rb") as file:
                return Trouble.model_validate_json(file.read(MAX_BYTES))
        except (OSError, ValueError, ValidationError):
            return None

    def note_unread(self, export: Export, error: AenvError | None) -> None:
        """Write down that an engine is about to be told an I/O error: who keeps what came of it, looks first.

        None: make the room for it, at a time when there is some.
        """
        text = b""
        if error is not None:
            why = error.message.encode()[:1000].decode(errors="ignore")
            text = (
                Trouble(code=error.code, message=why, fix=error.fix[:200], at_s=time.time())
                .model_dump_json()
                .encode()
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if error is None else 0)
        with suppress(FileExistsError):
            descriptor = os.open(self._unread(export.data), flags, 0o600)
            try:
                os.pwrite(descriptor, text.ljust(UNREAD_BYTES), 0)
            finally:
                os.close(descriptor)

    def unread(self, name: str) -> bytes:
        """The last such note of an export; it is another one after each that failed. Empty: there is none."""
        try:
            with self._unread(name.rpartition(".")[0]).open("rb") as file:
                return file.read(UNREAD_BYTES).strip()
        except OSError:
            return b""

    def _unread(self, data: str) -> Path:
        return self.directory / f"{data.replace('/', '')[:200]}.unread"

    def _path(self, name: str) -> Path:
        if "/" in name or not name or name.startswith("."):
            raise NotFound(f"nothing is served as {name[:80]!r}")
        return self.directory / f"{name[:200]}.json"

    def _trouble(self, data: str) -> Path:
        return self.directory / f"{data.replace('/', '')[:200]}.trouble"


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
