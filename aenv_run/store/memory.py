"""A store in memory that behaves as the real ones do, and can fail or stop at any operation."""

from __future__ import annotations

import builtins
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from aenv_run.errors import Conflict, CorruptData, InvalidInput, NotFound
from aenv_run.store.faults import Crash as Crash
from aenv_run.store.faults import Fault as Fault
from aenv_run.store.faults import Faults
from aenv_run.store.protocol import KeyInfo, StoreKey, Stray


@dataclass
class _Object:
    data: bytes
    modified_s: float = field(default_factory=time.time)


class MemoryStore:
    """See ``Store``. Nothing is local: ``local_path`` is always None."""

    def __init__(self) -> None:
        self._faults = Faults()
        self._objects: dict[StoreKey, _Object] = {}
        self._temporaries: builtins.list[str] = []

    @property
    def operations(self) -> int:
        """How many there were."""
        return self._faults.operations

    def arm(self, fault: Fault) -> None:
        """Let ``fault`` happen."""
        self._faults.arm(fault)

    def restart(self) -> None:
        """The process comes back after a crash."""
        self._faults.restart()

    def damage(self, key: StoreKey, data: bytes) -> None:
        """Replace an object's bytes as a broken or hostile store would."""
        with self._faults.lock:
            self._objects[key] = _Object(data)

    def age(self, key: StoreKey, seconds: float) -> None:
        """Let an object be that much older than it is; less than 0: its time is in the future."""
        with self._faults.lock:
            self._objects[key] = _Object(self._objects[key].data, time.time() - seconds)

    @property
    def conditional(self) -> bool:
        """See ``Store``."""
        return True

    # Writing

    def require_writable(self) -> None:
        """See ``Store``. Only a write could tell, and each says so itself."""

    def put_file(self, key: StoreKey, source: Path, *, consume: bool = False) -> bool:
        """See ``Store``. Always a copy."""
        if source.is_symlink() or (source.exists() and not source.is_file()):
            raise InvalidInput(f"{source}, which is to be stored, is not a regular file")
        if not source.exists():
            raise NotFound(f"{source}, which is to be stored, does not exist")
        return self.put_new(key, source.read_bytes())

    def put_new(self, key: StoreKey, data: bytes) -> bool:
        """See ``Store``."""
        with self._operation(writes=key):
            if key in self._objects:
                return False
            self._require_place(key)
            self._objects[key] = _Object(bytes(data))
            return True

    def swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        """See ``Store``."""
        with self._operation(writes=key):
            present = self._objects.get(key)
            if (present.data if present else None) != expected:
                return False
            self._require_place(key)
            self._objects[key] = _Object(bytes(data))
            return True

    def delete(self, key: StoreKey) -> None:
        """See ``Store``."""
        with self._operation():
            self._objects.pop(key, None)

    # Reading

    def read(self, key: StoreKey, *, limit_bytes: int) -> bytes:
        """See ``Store``."""
        with self._operation():
            data = self._get(key).data
        if len(data) > limit_bytes:
            raise CorruptData(f"{key} has {len(data)} bytes, more than {limit_bytes}")
        return data

    def read_range(self, key: StoreKey, offset: int, length: int) -> bytes:
        """See ``Store``."""
        if offset < 0 or length < 0:
            raise InvalidInput(f"range {offset}+{length} of {key} is negative")
        with self._operation():
            data = self._get(key).data[offset : offset + length]
        if len(data) != length:
            raise CorruptData(f"{key} ends before the end of the range {offset}+{length}")
        return data

    @contextmanager
    def open(self, key: StoreKey) -> Iterator[BinaryIO]:
        """See ``Store``."""
        with self._operation():
            data = self._get(key).data
        with io.BytesIO(data) as file:
            yield file

    def stat(self, key: StoreKey) -> KeyInfo | None:
        """See ``Store``."""
        with self._operation():
            found = self._objects.get(key)
            return KeyInfo(key, len(found.data), found.modified_s) if found else None

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """See ``Store``."""
        with self._operation():
            rows = [
                KeyInfo(k, len(o.data), o.modified_s) for k, o in self._objects.items() if k.startswith(prefix)
            ]
        return iter(rows)

    def strays(self) -> Iterator[Stray]:
        """See ``Store``."""
        with self._operation():
            paths = builtins.list(self._temporaries)
        return iter([Stray("temporary", path, "left by a writer that died", time.time()) for path in paths])

    def clear(self, stray: Stray) -> None:
        """See ``Store``."""
        if stray.kind != "temporary":
            raise InvalidInput(f"{stray.path} is no unfinished write")
        with self._operation():
            self._temporaries = [path for path in self._temporaries if path != stray.path]

    @property
    def has_files(self) -> bool:
        """See ``Store``."""
        return False

    def local_path(self, key: StoreKey) -> Path | None:
        """See ``Store``."""
        return None

    # Pieces

    def _get(self, key: StoreKey) -> _Object:
        if (found := self._objects.get(key)) is None:
            raise NotFound(f"{key} is not in the store")
        return found

    def _require_place(self, key: StoreKey) -> None:
        parts = key.split("/")
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        for other in self._objects:
            if other in above:
                raise Conflict(f"nothing can be stored below {other}: it is an object")
            if other.startswith(key + "/"):
                raise Conflict(f"{key} cannot be stored: other keys begin with {key}/")

    @contextmanager
    def _operation(self, writes: StoreKey | None = None) -> Iterator[None]:
        def half() -> None:
            if writes:
                self._temporaries.append(f".tmp/{self.operations}-{writes.replace('/', '-')}")

        with self._faults.lock, self._faults.operation(half):
            yield
