"""Who may import whom, and why. One rule is one row of RULES."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest

from tests.style.source import Module, imports, modules, within

BYTES = tuple(
    f"aenv_run.{part}"
    for part in (
        *("store", "repository", "catalog", "cache", "check", "gc", "blocks"),
        *("blobs", "packed", "chunks", "chunk_table", "describe", "packing"),
    )
)
MACHINES = tuple(
    f"aenv_run.{part}"
    for part in ("drivers", "disk", "memory", "memory_layers", "memory_files", "network", "guest")
)


@dataclass(frozen=True)
class Rule:
    """No module within ``source`` imports one within ``target``."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    reason: str


RULES = (
    Rule(
        ("aenv_run",),
        ("aenv_build",),
        "a node that only runs sandboxes must not need the builder: aenv_build stands on aenv_run, never below it",
    ),
    Rule(
        BYTES,
        MACHINES,
        "the bytes half must work where no machine can run (CI, a storage host): a Capture is all that crosses",
    ),
    Rule(
        MACHINES,
        BYTES,
        "a driver must work with files from anywhere: a Capture is all that crosses",
    ),
    Rule(
        ("aenv_run",),
        ("tests",),
        "the product never depends on its tests",
    ),
    Rule(
        ("aenv_build",),
        ("tests",),
        "the product never depends on its tests",
    ),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.source[0]}-not-{rule.target[0]}")
def test_imports_follow_the_rules(rule: Rule) -> None:
    broken = [
        f"{module.path}:{line} imports {name}"
        for module in modules()
        if within(module.name, rule.source)
        for line, name in imports(module)
        if within(name, rule.target)
    ]
    assert not broken, "\n".join([*broken, f"reason: {rule.reason}"])


# Module -> why it may end the process, beside the command line.
MAY_EXIT = {
    "aenv_build.bases.unpack": "runs as a process of its own, confined, and reports by its exit code",
    "aenv_run.drivers.gvisor_template": "a copied process ends where its work does, in the middle of its copier",
    "aenv_run.blocks.process": "the child that serves must not run what its parent has to do at its end",
}


def exits(module: Module) -> list[int]:
    """Lines that end the process."""
    return [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "exit", "quit", "os._exit")
    ]


def is_entry_point(module: Module) -> bool:
    commands = ("aenv_run.cli", "aenv_build.cli", "aenv_build.commands.command", *MAY_EXIT)
    return within(module.name, commands) or module.name.endswith(".__main__")


def test_only_the_command_line_ends_the_process() -> None:
    broken = [
        f"{module.path}:{line}" for module in modules() if not is_entry_point(module) for line in exits(module)
    ]
    assert not broken, "\n".join([*broken, "reason: a library raises, its caller decides"])
