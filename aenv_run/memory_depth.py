"""Captures whose memory has more layers than a restore can take: merged before anybody stands on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from aenv_run.capture import Capture
from aenv_run.drivers.protocol import Driver


async def within_depth(driver: Driver, capture: Capture, below: Mapping[str, Path]) -> Capture:
    """``capture`` in few enough layers; ``below`` is the image its machine was restored from, by role.

    The machine runs on meanwhile, if it was to. On failure nothing of the capture is left.
    """
    whole = capture.whole_memory(below, capture.memory)
    try:
        merged = await driver.merge_memory(whole, capture.directory / "merged", eager=False)
    except BaseException:
        capture.discard()
        raise
    if merged is None:
        return capture
    stay = tuple(role for role, path in merged.items() if below.get(role) == path)
    own = {role: path for role, path in merged.items() if role not in stay}
    return replace(capture, memory=own, memory_below=stay)
