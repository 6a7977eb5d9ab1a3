"""Archives that clients put: by the hash that they gave them, bounded, whole or not there."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from aenv_run import durable
from aenv_run.errors import InvalidInput, LimitReached, TooLarge, from_os

HASH = r"[0-9a-f]{64}"
#: For a client to begin: the transfer itself may take as long as it moves.
TOKEN_S = 3600
#: Between two pieces of a body.
SILENCE_S = 60.0
PREFIX = "incoming-"


@dataclass
class Archives:
    """A directory of them. With what is coming they take ``total_bytes`` at most: the least recently used go."""

    directory: Path
    seed: bytes = field(repr=False)
    max_bytes: int
    total_bytes: int
    _coming_bytes: int = 0

    def path(self, hash: str) -> Path:
        """Where it lies."""
        if not re.fullmatch(HASH, hash):
            raise InvalidInput(f"{hash[:80]!r} is not a hash: 64 lower-case hex digits")
        return self.directory / f"{hash}.tar"

    def has(self, hash: str) -> bool:
        """Blocking: whether it is there; then it counts as used."""
        path = self.path(hash)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return True
        return False

    def token(self, hash: str, now_s: float | None = None) -> str:
        """Lets its holder put that archive, for a while."""
        until = int((time.time() if now_s is None else now_s) + TOKEN_S)
        return f"{until}.{self._mac(hash, until)}"

    def admits(self, hash: str, token: str) -> bool:
        """Whether the token is for that archive, and not too old."""
        until, _, mac = token.partition(".")
        if not re.fullmatch(r"[0-9]{1,12}", until):
            return False
        right = hmac.compare_digest(self._mac(hash, int(until)).encode(), mac.encode())
        return right and int(until) >= time.time()

    def _mac(self, hash: str, until: int) -> str:
        return hmac.new(self.seed, f"upload:{hash}:{until}".encode(), "sha256").hexdigest()

    async def put(self, hash: str, body: AsyncIterator[bytes], size_bytes: int) -> None:
        """Take exactly that much; ``InvalidInput`` when it is less or more, and then nothing is kept."""
        if size_bytes > (largest := min(self.max_bytes, self.total_bytes)):
            raise TooLarge(f"the archive has {size_bytes} bytes; at most {largest} are taken")
        if self._coming_bytes + size_bytes > self.total_bytes:
            raise LimitReached(
                f"no room for {size_bytes} bytes beside the {self._coming_bytes} of other uploads",
                fix="try again when they are done, or raise the server's setting max_uploads_bytes",
            )
        target = self.path(hash)
        path = self.directory / f"{PREFIX}{secrets.token_hex(8)}"
        self._coming_bytes += size_bytes
        try:
            await asyncio.to_thread(self.directory.mkdir, mode=0o700, parents=True, exist_ok=True)
            await asyncio.to_thread(self._make_room)
            await self._write(path, body, size_bytes)
            await asyncio.to_thread(path.replace, target)
            await asyncio.to_thread(durable.sync, self.directory)
        except OSError as error:
            raise from_os(error, "an archive cannot be kept") from error
        finally:
            self._coming_bytes -= size_bytes
            path.unlink(missing_ok=True)

    async def _write(self, path: Path, body: AsyncIterator[bytes], size_bytes: int) -> None:
        taken = 0
        pieces = body.__aiter__()
        with path.open("xb") as file:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        piece = await anext(pieces, None)
                except TimeoutError:
                    raise InvalidInput(f"the archive broke off: nothing came for {SILENCE_S:g} s") from None
                if piece is None:
                    break
                taken += len(piece)
                if taken > size_bytes:
                    break
                await asyncio.to_thread(file.write, piece)
            if taken != size_bytes:
                raise InvalidInput(f"the archive has {taken} bytes or more, and {size_bytes} were announced")
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())

    def _make_room(self) -> None:
        """What an upload that broke off left goes after a day; of whole ones the least recently used."""
        found = []
        for path in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                info = path.stat()
                if path.name.startswith(PREFIX):
                    if time.time() - info.st_mtime > 86400:
                        path.unlink()
                else:
                    found.append((info.st_mtime, info.st_size, path))
        total = self._coming_bytes + sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.total_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
