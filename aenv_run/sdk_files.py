"""``sandbox.files``: the files of a sandbox. Names as users of E2B's SDK know them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, overload

from aenv_run.errors import Conflict, NotFound
from aenv_run.guest import EntryInfo
from aenv_run.sdk_guest import GuestCall


class AsyncFiles:
    """``AsyncSandbox.files``. Relative paths start at the user's home; ``user`` is who acts (default: the
    sandbox's user)."""

    def __init__(self, call: GuestCall) -> None:
        self._call = call

    @overload
    async def read(self, path: str, format: Literal["text"] = "text", *, user: str | None = None) -> str: ...

    @overload
    async def read(self, path: str, format: Literal["bytes"], *, user: str | None = None) -> bytes: ...

    async def read(
        self, path: str, format: Literal["text", "bytes"] = "text", *, user: str | None = None
    ) -> str | bytes:
        """The whole file, as text (UTF-8; what is not becomes U+FFFD) or as bytes."""
        data: bytes = await self._call(lambda guest: guest.read_file(path, user=user))
        return data if format == "bytes" else data.decode(errors="replace")

    async def write(self, path: str, data: str | bytes | Path, *, user: str | None = None) -> EntryInfo:
        """Create or replace a file; missing parents are made. A ``Path`` is a file of this host."""
        content = data if isinstance(data, bytes | Path) else data.encode()
        await self._call(lambda guest: guest.write_file(path, content, user=user))
        return await self.get_info(path, user=user)

    async def list(self, path: str, depth: int = 1, *, user: str | None = None) -> list[EntryInfo]:
        """What is in a directory, to ``depth`` levels."""
        return await self._call(lambda guest: guest.list_dir(path, depth=depth, user=user))

    async def get_info(self, path: str, *, user: str | None = None) -> EntryInfo:
        """One entry; ``NotFound`` without one."""
        return await self._call(lambda guest: guest.stat(path, user=user))

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is such an entry."""
        try:
            await self.get_info(path, user=user)
        except NotFound:
            return False
        return True

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """Delete it and all below it."""
        await self._call(lambda guest: guest.remove(path, user=user))

    async def rename(self, old_path: str, new_path: str, *, user: str | None = None) -> EntryInfo:
        """Move it."""
        return await self._call(lambda guest: guest.move(old_path, new_path, user=user))

    async def make_dir(self, path: str, *, user: str | None = None) -> bool:
        """Make a directory and its parents; False if it was there already."""
        try:
            await self._call(lambda guest: guest.make_dir(path, user=user))
        except Conflict:
            return False
        return True
