#!/usr/bin/env python3
"""Best of N: fork the task's start state once per candidate, score all at once, keep the best as a snapshot.

.venv/bin/python examples/best_of_n.py
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aenv_run import Sandbox
from aenv_run.errors import AenvError

CANDIDATES = sorted(Path(__file__).with_name("swe-task").glob("patches/*.patch"))


def reward(child: Sandbox, patch: Path) -> float:
    """Apply one candidate in its own sandbox and score it."""
    child.files.write("/tmp/candidate.patch", patch)
    child.commands.run("git apply /tmp/candidate.patch", cwd="/srv/repo", check=True)
    return float(json.loads(child.commands.run("python3 /srv/task/score.py", timeout=300).stdout)["reward"])


with Sandbox.create("swe-task", timeout=600) as start:
    children = [child for child in start.fork(len(CANDIDATES)) if not isinstance(child, AenvError)]
    try:
        with ThreadPoolExecutor() as pool:
            rewards = list(pool.map(reward, children, CANDIDATES))
        best = max(range(len(rewards)), key=rewards.__getitem__)
        kept = children[best].snapshot("swe-task-best", tags=["latest"])
        print(f"{CANDIDATES[best].stem}: reward {rewards[best]}, kept as {kept.name}:{kept.version}")
    finally:
        for child in children:
            child.kill()
