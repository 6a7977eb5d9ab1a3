"""Any store, made to fail or to stop at its n-th operation, and one whose clock runs backwards."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from aenv_run.store import KeyInfo, Store, StoreKey, Stray
from aenv_run.store.faults import Fault, Faults


class FaultyStore:
    """See ``Store``: what ``inner`` does, but where a fault is due. Half an operation is none of it."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.faults = Faults()

    @property
    def operations(self) -> int:
        return self.faults.operations

    def arm(self, fault: Fault) -> None:
        self.faults.arm(fault)

    def restart(self) -> None:
        self.faults.restart()

    def put_file(self, key: StoreKey, source: Path, *, consume: bool = False) -> bool:
        with self.faults.operation():
            return self.inner.put_file(key, source, consume=consume)

    def put_new(self, key: StoreKey, data: bytes) -> bool:
        with self.faults.operation():
            return self.inner.put_new(key, data)

    def swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        with self.faults.operation():
            return self.inner.swap(key, data, expected=expected)

    def read(self, key: StoreKey, *, limit_bytes: int) -> bytes:
        with self.faults.operation():
            return self.inner.read(key, limit_bytes=limit_bytes)

    def read_range(self, key: StoreKey, offset: int, length: int) -> bytes:
        with self.faults.operation():
            return self.inner.read_range(key, offset, length)

    @contextmanager
    def open(self, key: StoreKey) -> Iterator[BinaryIO]:
        with self.faults.operation(), self.inner.open(key) as file:
            yield file

    def stat(self, key: StoreKey) -> KeyInfo | None:
        with self.faults.operation():
            return self.inner.stat(key)

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        with self.faults.operation():
            rows = builtins.list(self.inner.list(prefix))
        return iter(rows)

    def delete(self, key: StoreKey) -> None:
        with self.faults.operation():
            self.inner.delete(key)

    def strays(self) -> Iterator[Stray]:
        return self.inner.strays()

    def clear(self, stray: Stray) -> None:
        self.inner.clear(stray)

    @property
    def conditional(self) -> bool:
        return self.inner.conditional

    @property
    def has_files(self) -> bool:
        return self.inner.has_files

    def local_path(self, key: StoreKey) -> Path | None:
        return self.inner.local_path(key)


class BackwardsStore(FaultyStore):
    """Its clock goes back an hour with every look at it: each object seems older than all seen before."""

    STEP_S = 3600.0

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._back_s = 0.0

    def stat(self, key: StoreKey) -> KeyInfo | None:
        found = super().stat(key)
        return self._earlier(found) if found else None

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        return iter([self._earlier(found) for found in super().list(prefix)])

    def _earlier(self, found: KeyInfo) -> KeyInfo:
        self._back_s += self.STEP_S
        return replace(found, modified_s=found.modified_s - self._back_s)
