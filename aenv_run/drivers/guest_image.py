"""The guest's kernel and its initramfs: the daemon as ``/init`` and the modules, packed the same each time."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from aenv_run.digest import digest_file
from aenv_run.errors import MissingDependency
from aenv_run.paths import Home
from aenv_run.types import Architecture, Digest

#: Changes with the layout of the archive, so that an older cached one is not used.
LAYOUT = "aenv.initramfs/1"
DIRECTORY, REGULAR, CHARACTER = 0o040755, 0o100644, 0o020600
FIX = "run scripts/setup in a checkout, or set AENV_GUEST_DIR to a directory with envd-<arch> and kernel/"


@dataclass(frozen=True)
class GuestImage:
    """What a cold boot is given."""

    kernel: Path
    initramfs: Path
    kernel_digest: Digest
    envd_digest: Digest
    release: str


@dataclass(frozen=True)
class GuestFiles:
    """Where the parts are found: all checked to exist."""

    kernel: Path
    envd: Path
    modules: tuple[Path, ...]
    release: str

    @classmethod
    def find(cls, home: Home, architecture: Architecture) -> GuestFiles:
        """The files below ``Home.guest()``; MissingDependency names the first that is not there."""
        root = home.guest()
        kernel, envd = root / "kernel" / "vmlinuz", root / f"envd-{architecture}"
        for path, what in (
            (kernel, "guest kernel"),
            (envd, "guest daemon"),
            (root / "kernel" / "kernel.json", ""),
        ):
            if not path.is_file():
                raise MissingDependency(
                    f"the {what or 'description of the guest kernel'} {path} is missing", fix=FIX
                )
        described = json.loads((root / "kernel" / "kernel.json").read_bytes())
        modules = tuple(sorted((root / "kernel" / "modules").glob("*.ko")))
        return cls(kernel, envd, modules, str(described.get("release", "unknown")))


@lru_cache(maxsize=64)
def _digest_of(path: Path, size: int, mtime_ns: int, inode: int) -> Digest:
    return digest_file(path)


def known_digest(path: Path) -> Digest:
    """The file's digest, read once per process as long as the file stays the same."""
    facts = path.stat()
    return _digest_of(path, facts.st_size, facts.st_mtime_ns, facts.st_ino)


def prepare(home: Home, architecture: Architecture) -> GuestImage:
    """Find the guest's parts and make (or find in the home's cache) their initramfs."""
    files = GuestFiles.find(home, architecture)
    kernel_digest, envd_digest = known_digest(files.kernel), known_digest(files.envd)
    parts = [LAYOUT, envd_digest, *(f"{module.name}={known_digest(module)}" for module in files.modules)]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    path = home.cache / "guest" / f"initramfs-{key[:32]}.cpio"
    if not path.exists():
        _write_once(path, build_initramfs(files.envd, files.modules))
    return GuestImage(files.kernel, path, kernel_digest, envd_digest, files.release)


def _write_once(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".initramfs-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.chmod(0o444)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def build_initramfs(envd: Path, modules: tuple[Path, ...]) -> bytes:
    """The archive (cpio newc, see the kernel's Documentation/driver-api/early-userspace/buffer-format.rst).

    Not compressed: the guest would spend more time unpacking it in software than reading it.
    """
    out = bytearray()
    for name in ("dev", "modules", "proc", "sys", "sysroot"):
        _entry(out, name, DIRECTORY)
    _entry(out, "dev/console", CHARACTER, device=(5, 1))  # the kernel opens it before /init mounts /dev
    _entry(out, "init", REGULAR | 0o111, envd.read_bytes())
    for module in modules:
        _entry(out, f"modules/{module.name}", REGULAR, module.read_bytes())
    _entry(out, "TRAILER!!!", 0)
    return bytes(out)


def _entry(out: bytearray, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
    encoded = name.encode() + b"\0"
    # ino 0 with one link is no hard link; owner, time and checksum are 0
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0)
    out += b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    out += bytes(-len(out) % 4) + data
    out += bytes(-len(out) % 4)
