#!/usr/bin/env python3
"""E2B's own client, unchanged: one start state, a fork for each candidate, all tried at once.

aenv serve --port 8000 &
export E2B_API_URL=http://127.0.0.1:8000 E2B_SANDBOX_URL=http://127.0.0.1:8000 E2B_API_KEY=...
pip install e2b; python examples/e2b_fork.py [TEMPLATE]     (default python: aenv-build recipes/python.yaml)
"""

import asyncio
import sys

from e2b import AsyncSandbox, CommandExitException

TASK = "from add import add; assert add(2, 3) == 5, add(2, 3)"
CANDIDATES = ["a - b", "a + b", "b + b"]


async def reward(child: AsyncSandbox, candidate: str) -> int:
    """1 where the task's test passes with that candidate."""
    await child.files.write("/tmp/add.py", f"def add(a, b):\n    return {candidate}\n")
    try:
        await child.commands.run(f'python3 -c "{TASK}"', cwd="/tmp", timeout=60)
    except CommandExitException as failed:
        print(f"{candidate}: {failed.stderr.splitlines()[-1]}")
        return 0
    return 1


async def main() -> None:
    """Print each candidate's reward."""
    template = sys.argv[1] if len(sys.argv) > 1 else "python"
    async with await AsyncSandbox.create(template, timeout=300) as start:
        forked = zip(await start.fork(count=len(CANDIDATES), timeout=300), CANDIDATES, strict=True)
        tried = [(child, candidate) for child, candidate in forked if isinstance(child, AsyncSandbox)]
        try:  # a fork that failed is an exception in its place, and the others live
            rewards = await asyncio.gather(*(reward(child, candidate) for child, candidate in tried))
            print({candidate: points for (_, candidate), points in zip(tried, rewards, strict=True)})
        finally:
            await asyncio.gather(*(child.kill() for child, _ in tried))


asyncio.run(main())
