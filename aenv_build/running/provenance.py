"""How a version was built, for the catalog: the commit of the recipe's checkout, base, host, verifies."""

from __future__ import annotations

import json
import os
import re
import socket
from importlib.metadata import version
from pathlib import Path

from aenv_build.planning.base import BaseStage
from aenv_build.planning.plan import Plan
from aenv_build.reports.wording import base_words
from aenv_run import process
from aenv_run.catalog import Built
from aenv_run.catalog.records import now
from aenv_run.errors import AenvError
from aenv_run.printable import printable
from aenv_run.snapshot import Snapshot
from aenv_run.types import Digest

GIT_S = 20.0
MAX_VERIFIED = 200
#: Settings of a checkout by which git would run programs of its choice.
RUNS_PROGRAMS = re.compile(r"(?im)^(filter\.|core\.fsmonitor$|include|extensions\.worktreeconfig$)")


def how_built(
    plan: Plan, driver: str, output: Snapshot, source: tuple[str | None, bool | None], state: str | None = None
) -> Built:
    """The note of one output, which is the state after that step, built from ``source`` (``source_state``)."""
    commit, dirty = source
    verified = [stage.id for stage in plan.stages.values() if stage.step.verb == "verify"]
    root = plan.base_of(state)
    return Built(
        recipe_digest=plan.source.digest,
        source_commit=commit,
        source_dirty=dirty,
        base=printable(base_words(plan))[:512],
        base_digest=_base_digest(root, output),
        builder=f"aenv-build {version('aenv')}",
        driver=driver,
        host=socket.gethostname()[:256],
        at=now(),
        verified=tuple(verified[:MAX_VERIFIED]),
    )


async def source_state(folder: Path) -> tuple[str | None, bool | None]:
    """The commit that is checked out, and whether anything there differs from it; None for what is not known.

    It never fails a build. A checkout can name programs for git to run: only what runs none is asked, and nothing
    of the index is written.
    """
    commit = await _git(folder, "rev-parse", "--verify", "HEAD^{commit}")
    if commit is None or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit.strip()):
        return None, None
    settings = await _git(folder, "config", "--local", "--no-includes", "--name-only", "--list")
    if settings is None or RUNS_PROGRAMS.search(settings):
        return commit.strip(), None
    status = await _git(folder, "status", "--porcelain", "--untracked-files=normal", "--ignore-submodules=dirty")
    return commit.strip(), None if status is None else bool(status.strip())


async def _git(folder: Path, *words: str) -> str | None:
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        done = await process.run(["git", "-C", str(folder), *safe, *words], timeout_s=GIT_S, env=quiet)
    except AenvError:  # no git, or it took too long, or said too much
        return None
    return done.stdout.decode(errors="replace") if done.exit_code == 0 else None


def _base_digest(base: BaseStage, output: Snapshot) -> Digest:
    """Of the image or the archive; of a snapshot its id; else of the disk layer that the base became."""
    if base.image is not None:
        return base.image.manifest_digest
    if base.snapshot is not None:
        return Digest(f"sha256:{base.snapshot}")
    content = base.inputs.values.get("content")
    return Digest(json.loads(content)) if content else output.disk[0].digest
