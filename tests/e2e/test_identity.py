"""Sixteen children of one snapshot with a warm Python in it: nobody is a copy of another."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

import pytest

from aenv_run import AsyncSandbox
from aenv_run.errors import AenvError
from aenv_run.paths import Home
from tests.e2e.warm_python import ASK, Answer, answer

CHILDREN = 16
#: Those that are launched one by one differ in how they begin, not in their number: `make soak` launches sixteen.
LAUNCHED = CHILDREN if os.environ.get("AENV_SOAK") else 6
MAX_OFF_S = 0.5
#: A clock that is known so well can be judged wholly; a busy host may not answer that fast.
NARROW_S, QUESTIONS = 0.2, 5

pytestmark = pytest.mark.timeout(900)


async def ask(sandbox: AsyncSandbox) -> tuple[float, float, Answer]:
    """How far its clock is ahead of the host's, at least and at most, and its last answer.

    The guest read its clock at some time between a question and its answer: what load adds there is no error.
    """
    least_s, most_s = -math.inf, math.inf
    for _ in range(QUESTIONS):
        before_s = time.time()
        result = await sandbox.commands.run(list(ASK), timeout=60, check=True)
        after_s = time.time()
        answered = answer(result.stdout)
        least_s, most_s = max(least_s, answered.time_s - after_s), min(most_s, answered.time_s - before_s)
        if most_s - least_s < NARROW_S:
            break
    return least_s, most_s, answered


def check_clock(least_s: float, most_s: float) -> None:
    """Wrong only if it is certainly wrong, or if so much is known that it should be certainly right."""
    assert least_s < MAX_OFF_S and most_s > -MAX_OFF_S
    if most_s - least_s < NARROW_S:
        assert least_s > -MAX_OFF_S and most_s < MAX_OFF_S


async def launched(home: Home) -> Sequence[AsyncSandbox]:
    """Several of the snapshot itself."""
    made = (AsyncSandbox.create("plain", home=home, timeout=800) for _ in range(LAUNCHED))
    return await asyncio.gather(*made)


async def forked(home: Home) -> Sequence[AsyncSandbox]:
    """Sixteen forked at once from a running one."""
    async with await AsyncSandbox.create("plain", home=home, timeout=800) as parent:
        entries = await parent.fork(CHILDREN, timeout=800)
    assert not [entry for entry in entries if isinstance(entry, AenvError)]
    return [entry for entry in entries if isinstance(entry, AsyncSandbox)]


@pytest.mark.parametrize("make", [launched, forked])
async def test_children_have_the_time_and_nothing_in_common(
    warm: Home,
    make: Callable[[Home], Awaitable[Sequence[AsyncSandbox]]],
) -> None:
    children = await make(warm)
    try:
        found = [await ask(child) for child in children]
    finally:
        await asyncio.gather(*(child.kill() for child in children))
    print("clocks ahead by", *(f"{least_s:.3f}..{most_s:.3f}" for least_s, most_s, _ in found))
    for least_s, most_s, _ in found:
        check_clock(least_s, most_s)
    answers = [asdict(one) for *_, one in found]
    for field in ("getrandom", "uuid4", "boot_id", "machine_id", "hostname"):
        assert len({one[field] for one in answers}) == len(answers), field
    assert [one["hostname"] for one in answers] == [child.sandbox_id for child in children]
    # The interpreter is the snapshot's: it remembers what it drew when it started.
    assert len({one["born"] for one in answers}) == 1


async def test_a_seeded_generator_is_alike_in_all_copies_unless_a_hook_reseeds_it(warm: Home) -> None:
    drawn: dict[str, list[Answer]] = {}
    for name in ("plain", "warm-python"):
        copies = [await AsyncSandbox.create(name, home=warm, timeout=600) for _ in range(2)]
        try:
            drawn[name] = [answer((await copy.commands.run(list(ASK), check=True)).stdout) for copy in copies]
            if name == "warm-python":  # and again in a child of one, which is a copy of that one's memory
                (child,) = await copies[0].fork(1)
                assert isinstance(child, AsyncSandbox), child
                copies.append(child)
                drawn["next"] = [
                    answer((await copy.commands.run(list(ASK), check=True)).stdout) for copy in (copies[0], child)
                ]
        finally:
            await asyncio.gather(*(copy.kill() for copy in copies))
    assert len({one.random for one in drawn["plain"]}) == 1
    assert len({one.random for one in (*drawn["warm-python"], *drawn["next"])}) == 4
    assert len({one.born for ones in drawn.values() for one in ones}) == 1
