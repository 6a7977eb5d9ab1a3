"""How the parts of the SDK reach the guest of their sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from aenv_run.guest import Guest

T = TypeVar("T")


class GuestCall(Protocol):
    """Does ``work`` with the guest of a running sandbox, or says why that cannot be."""

    async def __call__(self, work: Callable[[Guest], Awaitable[T]]) -> T:
        """The result of ``work``."""
