"""Sixteen children of one running sandbox: nobody is a copy of another."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

from aenv_run import AsyncSandbox
from aenv_run.errors import AenvError
from aenv_run.paths import Home

CHILDREN = 16
WARM = "n=0; while :; do n=$((n+1)); echo $n >/dev/shm/n; sleep 0.5; done"
ASK = """
touch /dev/shm/now
dd if=/dev/urandom bs=32 count=1 2>/dev/null | busybox sha256sum
cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id /etc/machine-id
hostname
"""


async def ask(child: AsyncSandbox) -> tuple[float, list[str]]:
    """How far its clock is from the host's at most, and what must differ between siblings."""
    before_s = time.time()
    result = await child.commands.run(ASK, timeout=60)
    after_s = time.time()
    assert result.exit_code == 0, result
    touched = (await child.files.get_info("/dev/shm/now")).modified_time  # UTC, to the nanosecond
    clock_s = datetime.fromisoformat(touched[:26]).replace(tzinfo=UTC).timestamp()
    return max(before_s - clock_s, clock_s - after_s, 0.0), result.stdout.splitlines()


#: The loop empties the file before it writes the next number.
READ_COUNT = 'while n=$(cat /dev/shm/n); [ -z "$n" ]; do :; done; echo $n'


async def test_sixteen_children_have_the_time_and_nothing_in_common(home: Home) -> None:
    parent = await AsyncSandbox.create("tiny", home=home, timeout=600)
    await parent.commands.run(WARM, background=True, timeout=None)
    children: list[AsyncSandbox] = []
    try:
        for entry in await parent.fork(CHILDREN, timeout=600):
            assert not isinstance(entry, AenvError), entry
            children.append(entry)
        answers = [await ask(child) for child in children]
        assert max(off_s for off_s, _ in answers) < 0.5
        for values in zip(*(identity for _, identity in answers), strict=True):
            assert len(set(values)) == CHILDREN, values
        assert {identity[-1] for _, identity in answers} == {child.sandbox_id for child in children}
        warm = await asyncio.gather(*(child.commands.run(READ_COUNT) for child in children))
        assert all(int(one.stdout) > 0 for one in warm)
    finally:
        await asyncio.gather(*(child.kill() for child in (*children, parent)))
