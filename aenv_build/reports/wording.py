"""How stages read to people."""

from __future__ import annotations

import shlex

from aenv_build.language.recipe import Base
from aenv_build.language.verbs import FromStep
from aenv_build.planning.plan import Plan, Stage
from aenv_run.printable import printable

WIDTH = 60


def base_words(plan: Plan) -> str:
    """The recipe's base in a few words."""
    return _base_words(plan.source.recipe.base)


def _base_words(base: Base) -> str:
    if base.empty is not None:
        return "empty"
    if base.debootstrap is not None:
        return f"debootstrap {base.debootstrap.suite}"
    if base.image is not None:
        return _short(f"image {base.image}")
    return _short(f"archive {base.archive}" if base.archive is not None else f"snapshot {base.snapshot}")


def step_words(stage: Stage) -> str:
    """The verb and the start of what it does, on one line."""
    step = stage.step
    if step.base is not None:
        return _base_words(step.base)
    if step.mkdir is not None:
        return _short(f"mkdir {step.mkdir.path}")
    if step.copy_ is not None:
        source = step.copy_.from_
        shown = f"{source.step}:{source.path}" if isinstance(source, FromStep) else " ".join(step.copy_.paths)
        return _short(f"copy {shown} -> {step.copy_.to}")
    if step.write is not None:
        return _short(f"write {', '.join(file.to for file in step.files_written)}")
    if step.apt is not None:
        return _short(f"apt {' '.join(step.apt.packages)}")
    if step.pip is not None:
        requirements = [f"-r {step.pip.requirements}"] if step.pip.requirements is not None else []
        return _short(f"pip {' '.join([*step.pip.packages, *requirements])}")
    if step.git is not None:
        return _short(f"git {(step.git.ref or step.git.commit or '')[:12]} {step.git.url}")
    if not stage.makes_state and step.verify is None:
        return _short(f"{step.verb} {' '.join(step.env or ()) or step.workdir or step.user}")
    command = step.run or step.start
    words = command.command if command is not None else step.verify.run if step.verify is not None else ""
    text = words if isinstance(words, str) else shlex.join(words)
    return _short(f"{step.verb} {text}".strip())


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def duration(seconds: int) -> str:
    """``7d``, ``90s``: as recipes write it, in the largest unit that fits."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds % size_s == 0:
            return f"{seconds // size_s}{unit}"
    return f"{seconds}s"


def seconds(milliseconds: int) -> str:
    """``3.2 s`` or ``2 min 05 s``."""
    if milliseconds < 99_950:
        return f"{milliseconds / 1000:.1f} s"
    minutes, rest = divmod(round(milliseconds / 1000), 60)
    return f"{minutes} min {rest:02d} s"


def size(size_bytes: int) -> str:
    """``12.3 MiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
