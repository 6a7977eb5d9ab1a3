"""The kernels of this sandbox: one for each language by default, more when they are asked for."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from code_interpreter.kernel import Kernel
from code_interpreter.languages import normal


class NoContext(Exception):
    """No context has this id."""


class NoDirectory(Exception):
    """A context cannot start there."""


class Contexts:
    """Kernels by id. ``cwd`` is where they start unless told otherwise."""

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd
        # Their sockets' names must stay below 108 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="kernels-")
        self._sockets = Path(self._folder.name)
        self._kernels: dict[str, Kernel] = {}
        self._defaults: dict[str, Kernel] = {}
        self._making_default = asyncio.Lock()

    def all(self) -> Sequence[Kernel]:
        """In the order in which they were made."""
        return list(self._kernels.values())

    def get(self, id: str) -> Kernel:
        """That one."""
        if id not in self._kernels:
            raise NoContext(f"Context {id} not found")
        return self._kernels[id]

    async def default(self, language: str | None = None) -> Kernel:
        """The language's own, made when it is first asked for."""
        name = normal(language)
        async with self._making_default:
            if name not in self._defaults:
                self._defaults[name] = await self.create(name, None)
            return self._defaults[name]

    async def create(self, language: str | None, cwd: str | None) -> Kernel:
        """A new one; a relative ``cwd`` counts from the default directory."""
        where = self._cwd / Path(cwd).expanduser() if cwd else self._cwd
        if not where.is_dir():
            raise NoDirectory(f"cwd {str(where)!r} is no directory")
        kernel = Kernel(normal(language), str(where), self._sockets)
        await kernel.start()
        self._kernels[kernel.id] = kernel
        return kernel

    async def remove(self, id: str) -> None:
        """End one; a default one is made anew when it is asked for."""
        kernel = self.get(id)
        del self._kernels[id]
        if self._defaults.get(kernel.language) is kernel:
            del self._defaults[kernel.language]
        await kernel.close()

    async def close(self) -> None:
        """End all."""
        for kernel in self.all():
            await kernel.close()
        self._folder.cleanup()
