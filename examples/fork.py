#!/usr/bin/env python3
"""Fork a running sandbox: each child starts from this very instant, memory and disk, and goes its own way.

.venv/bin/python examples/fork.py [SNAPSHOT]
"""

import asyncio
import sys

from aenv_run import AsyncSandbox
from aenv_run.errors import AenvError


async def main(snapshot: str) -> None:
    """The async SDK: the same names with ``await``."""
    async with await AsyncSandbox.create(snapshot) as parent:
        await parent.files.write("/dev/shm/who", "parent")  # in memory, not on disk
        for number, child in enumerate(await parent.fork(3)):
            if isinstance(child, AenvError):  # one child may fail, the others and the parent live on
                print(f"child {number} failed: {child}")
                continue
            async with child:
                inherited = await child.files.read("/dev/shm/who")
                await child.files.write("/dev/shm/who", f"child {number}")
                print(f"{child.sandbox_id}: inherited {inherited!r}")
        print(f"the parent still reads {await parent.files.read('/dev/shm/who')!r}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "swe-task"))
