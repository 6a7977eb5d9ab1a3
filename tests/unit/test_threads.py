"""Work that is never left alone, however often its caller is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aenv_run.threads import in_thread, to_the_end


async def test_a_second_and_third_cancel_wait_for_the_end_too() -> None:
    started, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await go.wait()
        ended.set()

    task = asyncio.create_task(to_the_end(work()))
    await started.wait()
    for _ in range(3):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_thread_has_ended_when_its_cancelled_caller_goes_on() -> None:
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go.wait(30)
        ended.set()

    task = asyncio.create_task(in_thread(work))
    while not started.is_set():  # noqa: ASYNC110 - set by a thread
        await asyncio.sleep(0.001)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_what_it_returns_and_raises_is_its_own() -> None:
    assert await in_thread(int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await in_thread(int, "seven")


async def test_an_error_after_a_cancel_is_not_in_its_way() -> None:
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()
        raise ValueError("too late")

    task = asyncio.create_task(to_the_end(work()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
