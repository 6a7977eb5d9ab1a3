"""The initramfs: the same bytes each time, all that the guest's init expects, found again in the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aenv_run.drivers import guest_image
from aenv_run.errors import MissingDependency
from aenv_run.paths import Home
from aenv_run.types import Architecture

AMD64 = Architecture("amd64")


def entries(archive: bytes) -> dict[str, tuple[int, bytes, tuple[int, int]]]:
    """Name -> mode, content, device of a newc archive."""
    found = {}
    at = 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * index : at + 14 + 8 * index], 16) for index in range(13)]
        size, name_size = fields[6], fields[11]
        name = archive[at + 110 : at + 110 + name_size - 1].decode()
        start = (at + 110 + name_size + 3) & ~3
        if name == "TRAILER!!!":
            return found
        found[name] = (fields[1], archive[start : start + size], (fields[9], fields[10]))
        at = (start + size + 3) & ~3


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.delenv("AENV_GUEST_DIR", raising=False)
    guest = tmp_path / "guest"
    (guest / "kernel" / "modules").mkdir(parents=True)
    (guest / "kernel" / "vmlinuz").write_bytes(b"kernel")
    (guest / "kernel" / "kernel.json").write_text(json.dumps({"release": "6.12.1"}))
    (guest / "kernel" / "modules" / "001-b.ko").write_bytes(b"b")
    (guest / "kernel" / "modules" / "000-a.ko").write_bytes(b"aaa")
    (guest / "envd-amd64").write_bytes(b"daemon")
    return Home(tmp_path)


def test_the_layout_is_what_init_expects(home: Home) -> None:
    image = guest_image.prepare(home, AMD64)
    found = entries(image.initramfs.read_bytes())
    assert found["init"] == (0o100755, b"daemon", (0, 0))
    assert found["dev/console"] == (0o020600, b"", (5, 1))
    assert [name for name in found if name.startswith("modules/")] == ["modules/000-a.ko", "modules/001-b.ko"]
    assert found["modules/000-a.ko"][1] == b"aaa"
    for name in ("proc", "sys", "dev", "sysroot", "modules"):
        assert found[name][0] == 0o040755
    assert image.release == "6.12.1"


def test_the_same_parts_give_the_same_file_and_another_daemon_another(home: Home) -> None:
    first = guest_image.prepare(home, AMD64)
    content = first.initramfs.read_bytes()
    assert guest_image.prepare(home, AMD64) == first
    first.initramfs.unlink()
    assert guest_image.prepare(home, AMD64).initramfs.read_bytes() == content
    (home.guest() / "envd-amd64").write_bytes(b"another daemon")
    second = guest_image.prepare(home, AMD64)
    assert second.initramfs != first.initramfs
    assert second.envd_digest != first.envd_digest
    assert second.kernel_digest == first.kernel_digest
    assert first.initramfs.stat().st_mode & 0o222 == 0


@pytest.mark.parametrize("part", ["kernel/vmlinuz", "kernel/kernel.json", "envd-amd64"])
def test_a_missing_part_is_named_with_its_fix(home: Home, part: str) -> None:
    (home.guest() / part).unlink()
    with pytest.raises(MissingDependency, match=part) as error:
        guest_image.prepare(home, AMD64)
    assert "scripts/setup" in error.value.fix
