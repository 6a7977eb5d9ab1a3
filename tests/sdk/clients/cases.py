"""Cases of one client: each a method that a user calls, tried against a server; one JSON object a line tells how.

Run by the Python of the client's own environment, which has nothing of this project.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import e2b
import e2b_code_interpreter

WAIT_S = 60.0


class Missing(Exception):
    """This version of the client has no such method."""


@dataclass
class Site:
    """What the cases of one run share: the classes of the mode, and one sandbox."""

    mode: str
    Sandbox: Any
    Template: Any
    sandbox: Any = None
    snapshot_id: str = ""
    template: str = ""
    build: Any = None
    kept: dict[str, Any] = field(default_factory=dict)
    to_kill: list[Any] = field(default_factory=list)

    @property
    def unique(self) -> str:
        """A name that no other run has."""
        return f"sdk-{metadata.version('e2b')}-{self.mode}".replace(".", "-")


Case = Callable[[Site], Awaitable[object]]
CASES: list[tuple[str, Case]] = []


def case(name: str) -> Callable[[Case], Case]:
    """Register one; they run in the order in which they are registered."""

    def register(function: Case) -> Case:
        CASES.append((name, function))
        return function

    return register


def site(mode: str) -> Site:
    """Of synchronous or asynchronous classes, each with the code interpreter's methods too."""
    if mode == "sync":
        return Site(mode, e2b_code_interpreter.Sandbox, e2b.Template)
    return Site(mode, e2b_code_interpreter.AsyncSandbox, e2b.AsyncTemplate)


async def got(value: Any) -> Any:
    """A call's result in either mode."""
    return await value if inspect.isawaitable(value) else value


async def each(values: Any) -> AsyncIterator[Any]:
    """What an iterator of either mode gives."""
    if hasattr(values, "__aiter__"):
        async for value in values:
            yield value
    else:
        for value in values:
            yield value


async def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]
) -> BaseException:
    """The call fails like that."""
    try:
        value = await got(call())
    except kind as error:
        return error
    raise AssertionError(f"gave {value!r} instead of {kind}")


async def until(look: Callable[[], Any]) -> Any:
    """What it gives once it gives something."""
    end = time.monotonic() + WAIT_S
    while not (found := await got(look())):
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.05)
    return found


def has(thing: Any, *names: str) -> None:
    """Else the case is none of this version."""
    for name in names:
        if not hasattr(thing, name):
            raise Missing(name)


def accepts(function: Any, *names: str) -> None:
    """Else the case is none of this version."""
    for name in names:
        if name not in inspect.signature(function).parameters:
            raise Missing(name)


async def run(mode: str) -> None:
    """All cases, one after another; then nothing of them is left."""
    here = site(mode)
    try:
        without = os.environ.get("SDK_WITHOUT")
        for name, function in CASES:
            if without and re.search(without, name):
                continue
            began = time.monotonic()
            ok: bool | None = True
            try:
                detail = await function(here)
            except Missing as missing:
                ok, detail = None, f"no {missing}"
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
                lines = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
                ok, detail = False, f"{type(error).__name__}: {error} ({' '.join(lines)})"
            seconds = round(time.monotonic() - began, 3)
            line = {"method": name, "ok": ok, "detail": str(detail or ""), "seconds": seconds}
            print(json.dumps(line), flush=True)
            if name == "Sandbox.create" and not ok:
                sys.exit(1)
    finally:
        for sandbox in [*here.to_kill, here.sandbox]:
            with suppress(Exception):
                await got(sandbox.kill())
