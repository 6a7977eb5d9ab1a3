"""A stream of somebody else as one value, up to a bound."""

from __future__ import annotations

from collections.abc import AsyncIterable

from aenv_run.errors import AenvError


async def whole(chunks: AsyncIterable[bytes], limit_bytes: int, too_much: AenvError) -> bytes:
    """All of it; raises ``too_much`` as soon as there is more than ``limit_bytes``, which are never kept."""
    parts: list[bytes] = []
    size_bytes = 0
    async for chunk in chunks:
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            raise too_much
        parts.append(chunk)
    return b"".join(parts)
