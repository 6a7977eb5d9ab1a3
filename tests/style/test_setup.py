"""The parts of the set-up that can be wrong without being seen on the next machine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.style.source import ROOT

ONE_LINE = """
# deb http://off.invalid/debian bookworm main
deb-src http://mirror.invalid/debian bookworm main
deb http://vendor.invalid/linux bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/site.gpg] http://mirror.invalid/debian bookworm main contrib
deb http://mirror.invalid/debian bookworm-updates main
deb http://docker.invalid/linux/debian bookworm stable
"""
DEB822 = """
Types: deb
# a comment
URIs: http://vendor.invalid/linux
Suites: bookworm
Components: main

Types: deb deb-src
URIs: http://mirror.invalid/debian
Suites: bookworm
 bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/site.gpg

Enabled: no
Types: deb
URIs: http://mirror.invalid/debian
Suites: bookworm-backports
Components: main
"""
BACKPORTS = """Types: deb
URIs: http://mirror.invalid/debian
Suites: bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/site.gpg
"""
EMBEDDED_KEY = DEB822.replace(
    " /usr/share/keyrings/site.gpg", "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n AAAA"
)


def shell(command: str, *arguments: Path) -> str:
    script = f"""
        source scripts/lib/system.bash
        apt_sources() {{ awk -f scripts/lib/apt-sources.awk "${{files[@]}}"; }}
        files=("$@")
        {command}
    """
    done = subprocess.run(
        ["bash", "-c", script, "bash", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.list", ONE_LINE, BACKPORTS),
        ("a.sources", DEB822, BACKPORTS),
        ("a.sources", EMBEDDED_KEY, BACKPORTS.partition("Signed-By")[0]),
    ],
)
def test_backports_come_from_the_mirror_of_the_release(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    (tmp_path / name).write_text(text)
    assert shell("backports_source bookworm", tmp_path / name) == expected


def test_backports_that_are_there_are_not_added_again(tmp_path: Path) -> None:
    (tmp_path / "a.sources").write_text(DEB822.replace("Enabled: no\n", ""))
    command = "codename() { echo bookworm; }; needs_backports && echo needed || echo there"
    assert shell(command, tmp_path / "a.sources") == "there\n"
    (tmp_path / "a.sources").write_text(DEB822)
    assert shell(command, tmp_path / "a.sources") == "needed\n"


@pytest.fixture
def guest_kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("guest_kernel", ROOT / "scripts" / "guest_kernel.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "guest_kernel", module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def tree(root: Path, modules: dict[str, str], builtin: str = "") -> Path:
    (root / "kernel").mkdir(parents=True)
    for name, info in modules.items():
        (root / "kernel" / f"{name}.ko").write_bytes(b"\0" + info.encode() + b"\0")
    (root / "modules.builtin").write_text(builtin)
    return root


def test_modules_load_after_what_they_need(
    guest_kernel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_kernel, "WANTED", ("a_net", "b"))
    modules = {"a-net": "depends=z,virtio-ring", "z": "depends=\0softdep=pre: b alias-of-builtin", "b": "depends="}
    found = guest_kernel.load_order(tree(tmp_path, modules, "kernel/drivers/virtio_ring.ko\n"))
    assert [name for name, _ in found] == ["b", "z", "a_net"]


def test_a_module_that_is_not_there_is_named(
    guest_kernel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_kernel, "WANTED", ("a",))
    with pytest.raises(guest_kernel.SetupError, match="no module gone, which a needs"):
        guest_kernel.load_order(tree(tmp_path, {"a": "depends=gone"}))


def test_continuous_integration_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().splitlines()[-1] == "exec make test"


@pytest.mark.parametrize(("distribution", "wanted"), [("debian", True), ("ubuntu", False)])
def test_engines_that_tests_need_are_asked_for_where_they_can_be_had(distribution: str, wanted: bool) -> None:
    command = f"have() {{ return 1; }}; distribution() {{ echo {distribution}; }}; missing_packages"
    missing = shell(command).splitlines()
    assert ("runsc" in missing) is wanted
    assert {"nftables", "iproute2", "qemu-system-x86", "qemu-utils"} <= set(missing)
