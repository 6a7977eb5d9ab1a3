"""What came of calls that had an ``Idempotency-Key``: kept in files, for repeats after a crash too.

A file per key, written before the call begins and again with its outcome. A call that failed leaves none: it may
be repeated. A file without an outcome is of a server that was killed; the node knows whether the call was done,
because its sandbox carries the call's name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from aenv_run import durable
from aenv_run.api.errors import RETRY_AFTER_S, refuse
from aenv_run.errors import NodeUnavailable
from aenv_run.threads import in_thread
from aenv_run.types import Model

log = logging.getLogger(__name__)

MAX_KEYS = 10_000
MAX_AGE_S = 24 * 3600.0
#: How many new keys come between two looks for old ones.
TIDY_EVERY = 200
MAX_FILE_BYTES = 1 << 20


class Outcome(Model):
    """One file. ``call`` is the name that the sandbox carries; ``reply`` the answer as JSON, once there is one."""

    format: Literal["aenv.idempotency/1"] = "aenv.idempotency/1"
    request_digest: str
    call: str
    at_s: float
    reply: str | None = None


class Outcomes:
    """Of one home; one server at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: set[str] = set()
        self._new = 0

    async def once(
        self,
        key: str,
        body: BaseModel,
        work: Callable[[str], Awaitable[str]],
        *,
        find: Callable[[str], Awaitable[str | None]],
    ) -> str:
        """The answer of ``work``, which is done once for the key and body.

        ``work`` gets the call's name; ``find`` looks for what a call of that name has made and answers for it, or
        None when there is nothing.
        """
        name = hashlib.sha256(key.encode()).hexdigest()
        if name in self._running:
            raise in_progress()
        self._running.add(name)
        try:
            return await self._once(self._directory / f"{name}.json", _digest(body), work, find)
        finally:
            self._running.discard(name)

    async def _once(
        self,
        path: Path,
        digest: str,
        work: Callable[[str], Awaitable[str]],
        find: Callable[[str], Awaitable[str | None]],
    ) -> str:
        known = await in_thread(_read, path)
        if known is not None and known.request_digest != digest:
            raise refuse(
                422,
                "this Idempotency-Key came before with another body",
                error_code="idempotency_request_mismatch",
                headers={"Should-Retry": "false"},
            )
        if known is not None and known.reply is not None:
            return known.reply
        reply = await find(known.call) if known is not None else None
        if reply is None:
            known = Outcome(request_digest=digest, call=secrets.token_hex(12), at_s=time.time())
            await in_thread(self._write, path, known)
            try:
                reply = await work(known.call)
            except NodeUnavailable:
                raise  # it may have been done: the repeat looks
            except Exception:
                await in_thread(path.unlink, missing_ok=True)
                raise
        assert known is not None
        await in_thread(self._write, path, known.model_copy(update={"reply": reply, "at_s": time.time()}))
        return reply

    def _write(self, path: Path, outcome: Outcome) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._new % TIDY_EVERY == 0:
            self._tidy()
        self._new += 1
        durable.replace(path, outcome.model_dump_json().encode())

    def _tidy(self) -> None:
        """What is too old goes, and the oldest of what is too much."""
        found: list[tuple[float, Path]] = []
        for path in self._directory.iterdir():
            try:
                found.append((path.stat().st_mtime, path))
            except OSError:
                continue
        found.sort(reverse=True)
        oldest_s = time.time() - MAX_AGE_S
        for number, (changed_s, path) in enumerate(found):
            if changed_s < oldest_s or number >= MAX_KEYS - TIDY_EVERY:
                path.unlink(missing_ok=True)


def in_progress() -> Exception:
    """The refusal of a call that somebody is at."""
    return refuse(
        409,
        "the first call with this Idempotency-Key is still being answered",
        error_code="idempotency_in_progress",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def _digest(body: BaseModel) -> str:
    """Of what is asked for: the same in another order is the same, of another kind of call it is not."""
    asked = json.dumps(body.model_dump(mode="json", exclude_unset=True), sort_keys=True)
    return hashlib.sha256(f"{type(body).__name__} {asked}".encode()).hexdigest()


def _read(path: Path) -> Outcome | None:
    """None without one, or when it is damaged: then nothing is known of the call."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    try:
        outcome = Outcome.model_validate_json(data)
    except ValidationError:
        log.error("%s is damaged, and counts as none", path)
        return None
    return None if outcome.at_s < time.time() - MAX_AGE_S else outcome
