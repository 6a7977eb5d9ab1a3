"""Modules that are imported when they are first used: commands that do not need them start without them."""

from __future__ import annotations

import importlib
from types import ModuleType


class _Later(ModuleType):
    def __getattr__(self, name: str) -> object:
        module = importlib.import_module(self.__name__)
        if not hasattr(module, name):
            return importlib.import_module(f"{self.__name__}.{name}")
        return getattr(module, name)


def later(name: str) -> ModuleType:
    """Stands for the module, with its submodules as attributes. A type checker should see the import itself."""
    return _Later(name)
