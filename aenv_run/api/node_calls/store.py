"""The server's side of ``RemoteStore``: the home's repository, byte by byte, within its keys and nowhere else."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from aenv_run.api.node_calls.route import CallRoute, body_of
from aenv_run.api.server import Serving
from aenv_run.config import repository_name
from aenv_run.errors import AenvError, InvalidInput, StoreUnavailable, TooLarge
from aenv_run.node_wire import ErrorBody, known
from aenv_run.scratch import scratch
from aenv_run.server_link import CALLS
from aenv_run.store import Store, StoreKey, Stray
from aenv_run.store.remote_wire import (
    DIGEST_HEADER,
    IDLE_S,
    MAX_PIECE_BYTES,
    PIECE_BYTES,
    About,
    Done,
    Found,
    Row,
    StrayRow,
    Strays,
    Unframer,
)
from aenv_run.store.sparse import write_at
from aenv_run.threads import in_thread

#: More than any object of a repository.
MAX_FILE_BYTES = 4 << 40
ROWS_AT_ONCE = 1000
NDJSON = "application/x-ndjson"


@dataclass(frozen=True)
class Place:
    """A store, how people name it, and where a file that is being sent is kept meanwhile."""

    store: Store
    name: str
    staging: Path


async def place(serving: Serving) -> Place:
    """The dependency: the home's repository."""
    found = await serving.catalog()
    return Place(found.repository.store, repository_name(None, serving.home), serving.home.staging)


Here = Annotated[Place, Depends(place)]
Size = Annotated[int, Query(ge=0, le=1 << 62)]
Text = Annotated[str, Query(max_length=2048)]


def key(key: Text) -> StoreKey:
    """The dependency: a key, which leads nowhere else than into the store."""
    return StoreKey(key)


Key = Annotated[StoreKey, Depends(key)]
router = APIRouter(prefix=f"{CALLS}/store", route_class=CallRoute, include_in_schema=False)


@router.get("/about")
async def about(place: Here) -> About:
    """What does not change."""
    return About(place=place.name, conditional=await in_thread(_conditional, place.store))


def _conditional(store: Store) -> bool:
    return store.conditional


@router.post("/writable", status_code=204)
async def writable(place: Here) -> Response:
    """See ``Store.require_writable``."""
    await in_thread(place.store.require_writable)
    return Response(status_code=204)


# Reading


@router.get("/object")
async def read(place: Here, key: Key, limit: Size) -> Response:
    """All of a small object."""
    return _bytes(await in_thread(_read, place.store, key, limit))


def _read(store: Store, key: StoreKey, limit_bytes: int) -> bytes:
    found = store.stat(key)
    if found is not None and MAX_PIECE_BYTES < found.size_bytes <= limit_bytes:
        raise TooLarge(f"{key} has {found.size_bytes} bytes, more than one answer holds")
    return store.read(key, limit_bytes=min(limit_bytes, MAX_PIECE_BYTES))


@router.get("/range")
async def read_range(place: Here, key: Key, offset: Size, length: Size) -> Response:
    """Exactly that range."""
    if length > MAX_PIECE_BYTES:
        raise InvalidInput(f"a range of {length} bytes is more than one answer holds")
    return _bytes(await in_thread(place.store.read_range, key, offset, length))


def _bytes(data: bytes) -> Response:
    headers = {DIGEST_HEADER: hashlib.sha256(data).hexdigest()}
    return Response(data, media_type="application/octet-stream", headers=headers)


@router.get("/stream")
async def stream(place: Here, key: Key) -> Response:
    """All of an object from its start. Where it breaks off, so does the answer: its last chunk is missing."""
    stack = ExitStack()
    file = await in_thread(stack.enter_context, place.store.open(key))

    async def pieces() -> AsyncIterator[bytes]:
        try:
            while data := await in_thread(file.read, PIECE_BYTES):
                yield data
        finally:
            await in_thread(stack.close)

    return StreamingResponse(pieces(), media_type="application/octet-stream")


@router.get("/stat")
async def stat(place: Here, key: Key) -> Found:
    """Size and time."""
    found = await in_thread(place.store.stat, key)
    return Found() if found is None else Found(size_bytes=found.size_bytes, modified_s=found.modified_s)


@router.get("/list")
async def list_keys(place: Here, prefix: Text = "") -> Response:
    """One object per line, then how many there were: a list that breaks off has no such line."""
    rows = await in_thread(place.store.list, prefix)
    first = await in_thread(lambda: list(islice(rows, ROWS_AT_ONCE)))

    async def lines() -> AsyncIterator[bytes]:
        found, count = first, 0
        while found:
            count += len(found)
            texts = [
                Row(key=row.key, size_bytes=row.size_bytes, modified_s=row.modified_s).model_dump_json()
                for row in found
            ]
            yield "".join(f"{text}\n" for text in texts).encode()
            try:
                found = await in_thread(lambda: list(islice(rows, ROWS_AT_ONCE)))
            except (AenvError, OSError) as error:  # the head has been sent
                yield ErrorBody.of(known(error)).model_dump_json().encode() + b"\n"
                return
        yield Row(end=count).model_dump_json().encode() + b"\n"

    return StreamingResponse(lines(), media_type=NDJSON)


@router.get("/strays")
async def strays(place: Here) -> Strays:
    """What is no object."""
    found = await in_thread(lambda: list(place.store.strays()))
    rows = (StrayRow(kind=s.kind, path=s.path, detail=s.detail, modified_s=s.modified_s) for s in found)
    return Strays(strays=tuple(rows))


# Writing


@router.put("/object")
async def put_new(request: Request, place: Here, key: Key) -> Done:
    """See ``Store.put_new``."""
    data = await _whole(request)
    return Done(done=await in_thread(place.store.put_new, key, data))


@router.post("/swap")
async def swap(request: Request, place: Here, key: Key, expected: Size | None = None) -> Done:
    """The body is what is expected, ``expected`` bytes, and then what is to be there. None: absent."""
    data = await _whole(request)
    if expected is not None and expected > len(data):
        raise InvalidInput("the body is shorter than what is expected")
    before = None if expected is None else data[:expected]
    done = await in_thread(place.store.swap, key, data[expected or 0 :], expected=before)
    return Done(done=done)


async def _whole(request: Request) -> bytes:
    """A body whose digest is the one that was said."""
    data = await body_of(request, 2 * MAX_PIECE_BYTES)
    if hashlib.sha256(data).hexdigest() != request.headers.get(DIGEST_HEADER):
        raise StoreUnavailable("what was sent was damaged on its way: its digest is another", fix="try again")
    return data


@router.put("/file")
async def put_file(request: Request, place: Here, key: Key) -> Done:
    """A file in ``frames``. It is an object when all of it is here and its digest holds; before there is none."""
    with ExitStack() as stack:
        directory = await in_thread(stack.enter_context, scratch(place.staging))
        path = directory / "file"
        descriptor = await in_thread(os.open, path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, descriptor)
        unframer = Unframer(lambda offset, data: write_at(descriptor, data, offset), MAX_FILE_BYTES)
        body = aiter(request.stream())
        while (data := await _next(body)) is not None:
            await in_thread(unframer.take, data)
        if not unframer.complete:
            raise StoreUnavailable(f"the file for {key} broke off on its way", fix="try again")
        await in_thread(os.ftruncate, descriptor, unframer.size_bytes)
        return Done(done=await in_thread(place.store.put_file, key, path, consume=True))


async def _next(body: AsyncIterator[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout(IDLE_S):
            return await anext(body, None)
    except TimeoutError:
        raise StoreUnavailable(f"nothing of the file came for {IDLE_S:g} s", fix="try again") from None


@router.delete("/object", status_code=204)
async def delete(place: Here, key: Key) -> Response:
    """See ``Store.delete``."""
    await in_thread(place.store.delete, key)
    return Response(status_code=204)


@router.post("/clear", status_code=204)
async def clear(request: Request, place: Here) -> Response:
    """See ``Store.clear``; the store looks itself whether that is an unfinished write of its own."""
    try:
        row = StrayRow.model_validate_json(await _whole(request))
    except ValidationError:
        raise InvalidInput("the body is no unfinished write") from None
    if row.kind != "temporary":
        raise InvalidInput(f"{row.path} is no unfinished write")
    await in_thread(place.store.clear, Stray("temporary", row.path, row.detail, row.modified_s))
    return Response(status_code=204)
