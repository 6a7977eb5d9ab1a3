"""Nothing of a developer's machine, and nothing that is not source, is in the repository."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import PurePath

from tests.style.source import ROOT, tracked_files

LARGEST = 512 * 1024

# Split so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(rb"(?<![\w.$}~-])/(?:ro" + rb"ot/(?!\.cache\b)|ho" + rb"me/(?!user\b)\w|wo" + rb"rk/)")
REGISTRY_HOSTS = re.compile(
    rb"\b(?:(?:deb|security|snapshot|ftp)\.debi" + rb"an\.org|(?:archive|security)\.ubun" + rb"tu\.com|"
    rb"pypi\." + rb"org|files\.pythonh" + rb"osted\.org|proxy\.gol" + rb"ang\.org|registry\.npm" + rb"js\.org)\b"
)

# File -> why it may hold such paths.
MAY_NAME_HOMES = {
    "envd/internal/users/users_test.go": "reads an image's passwd file, written by the test",
}


def found(pattern: re.Pattern[bytes], allowed: Collection[str] = ()) -> list[str]:
    hits = []
    for name in sorted(set(tracked_files()) - set(allowed)):
        for number, line in enumerate((ROOT / name).read_bytes().splitlines(), 1):
            if match := pattern.search(line):
                hits.append(f"{name}:{number}: {match.group().decode()}")
    return hits


def test_no_paths_of_one_machine() -> None:
    hits = found(MACHINE_PATHS, MAY_NAME_HOMES)
    assert not hits, "derive these from the checkout, HOME or a setting:\n" + "\n".join(hits)


def test_no_registry_hosts() -> None:
    hits = found(REGISTRY_HOSTS)
    assert not hits, "leave the choice of a registry to the machine's configuration:\n" + "\n".join(hits)


def test_no_binaries() -> None:
    hits = [name for name in tracked_files() if b"\0" in (ROOT / name).read_bytes()]
    assert not hits, "build these instead of keeping them:\n" + "\n".join(hits)


def test_no_large_files() -> None:
    hits = [
        f"{name}: {size} bytes" for name in tracked_files() if (size := (ROOT / name).stat().st_size) > LARGEST
    ]
    assert not hits, f"larger than {LARGEST} bytes:\n" + "\n".join(hits)


def test_no_generated_directories() -> None:
    generated = {"__pycache__", ".venv", "build", "node_modules"}
    hits = [name for name in tracked_files() if generated & set(PurePath(name).parts[:-1])]
    assert not hits, "\n".join(hits)
