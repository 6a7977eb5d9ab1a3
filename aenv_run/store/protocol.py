"""What every byte store promises. One contract suite (tests/contracts/test_store_contract.py) checks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from aenv_run.types import Id


class StoreKey(Id):
    """Slash-separated, such as ``blobs/sha256/ab12…``; no empty, ``.`` or ``..`` part, no leading dot."""

    pattern, what = (
        r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,127}){0,7}",
        "store key",
    )


@dataclass(frozen=True)
class KeyInfo:
    """One stored object: its key, size and the store's own time of its last write (seconds since 1970)."""

    key: StoreKey
    size_bytes: int
    modified_s: float


@dataclass(frozen=True)
class Stray:
    """Something in the store's place that is no object: an unfinished write, or what others put there.

    ``modified_s``: the store's own time of an unfinished write (seconds since 1970), 0 where it is not known.
    """

    kind: Literal["temporary", "foreign"]
    path: str
    detail: str
    modified_s: float = 0.0


class Store(Protocol):
    """Named bytes. Blocking and thread-safe: call it from a thread in async code.

    Atomic: a reader sees the old bytes or the new, never a part. Durable: when a write returns, it survives a
    crash of the machine. Errors: ``NotFound`` for a missing key, ``NoSpace``, ``StoreUnavailable``
    (retryable), ``CorruptData`` when what came back is shorter than the store itself said. Where a store has
    directories it raises ``Conflict`` for a key that is the directory of another key or below another key; callers
    use no such keys.
    """

    @property
    def conditional(self) -> bool:
        """Whether writers of all homes exclude each other; False: the user has said that only one home writes."""

    def require_writable(self) -> None:
        """Raise what would forbid any write, with its fix: found by trying, where a store has to be tried."""

    def put_file(self, key: StoreKey, source: Path, *, consume: bool = False) -> bool:
        """Store the file's content if ``key`` is absent; returns whether it was. Sparse files stay sparse.

        What is stored is what the file had: over a wire both ends compare checksums. A file that is written
        meanwhile is ``InvalidInput`` where the store copies it.

        ``consume`` gives the file away: the store may take the file itself instead of copying it, so the
        caller never writes it again, and removes its own name of it when it likes (a failed call can be
        repeated). Without ``consume`` the stored object is never changed through the source afterwards.
        """

    def put_new(self, key: StoreKey, data: bytes) -> bool:
        """Create ``key``; False, and nothing written, if it exists. Exactly one of many callers gets True."""

    def swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        """Compare and set: write ``data`` if the present content is ``expected`` (None: absent).

        False, and nothing written, otherwise. Of concurrent callers with one ``expected`` exactly one wins.
        """

    def read(self, key: StoreKey, *, limit_bytes: int) -> bytes:
        """The whole content; ``CorruptData`` if it is longer than ``limit_bytes``."""

    def read_range(self, key: StoreKey, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; ``CorruptData`` if the object ends before."""

    def open(self, key: StoreKey) -> AbstractContextManager[BinaryIO]:
        """A reader from the start, closed by the context manager."""

    def stat(self, key: StoreKey) -> KeyInfo | None:
        """Size and time, or None when absent."""

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """Every complete object whose key starts with ``prefix``, in order of key. Never half-written ones."""

    def delete(self, key: StoreKey) -> None:
        """Remove it; no error when absent."""

    @property
    def has_files(self) -> bool:
        """Whether every object is a file of this machine, which ``local_path`` gives and ``put_file`` may take."""

    def local_path(self, key: StoreKey) -> Path | None:
        """A file of this machine with exactly the object's bytes, if the store has one; never write it."""

    def strays(self) -> Iterator[Stray]:
        """What lies in the store and is no object; ``list`` never shows it."""

    def clear(self, stray: Stray) -> None:
        """Remove an unfinished write; its writer, if it lives, fails. ``InvalidInput`` for what is foreign."""
