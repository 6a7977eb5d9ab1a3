"""What the style tests read: the tracked files, and the parsed modules of the two packages."""

from __future__ import annotations

import ast
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("aenv_run", "aenv_build")


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its path from the root, its text and tree."""

    name: str
    path: str
    text: str
    tree: ast.Module


@functools.cache
def tracked_files() -> tuple[str, ...]:
    """The files that git tracks, or will once they are added, from the root."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    names = {name for name in listed.stdout.decode().split("\0") if name}
    return tuple(sorted(name for name in names if (ROOT / name).is_file()))


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every module of the packages."""
    found = []
    for path in tracked_files():
        if path.endswith(".py") and path.split("/")[0] in PACKAGES:
            text = (ROOT / path).read_text()
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found.append(Module(name, path, text, ast.parse(text, path)))
    return tuple(found)


def imports(module: Module) -> list[tuple[int, str]]:
    """(line, dotted name) of everything the module imports, also inside functions and for types only.

    ``from a import b`` counts as ``a.b``: whether b is a module or a name in one, a prefix test is right.
    """
    package = module.name if module.path.endswith("__init__.py") else module.name.rpartition(".")[0]
    found: list[tuple[int, str]] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def within(name: str, parts: tuple[str, ...]) -> bool:
    """True when ``name`` is one of ``parts`` or below one of them."""
    return any(name == part or name.startswith(part + ".") for part in parts)
