"""A container image from a registry on loopback, built upon and booted. Needs a driver."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from aenv_run.config import open_repository
from aenv_run.paths import Home
from aenv_run.snapshot import Snapshot
from aenv_run.types import SnapshotId
from tests.cases.image_layers import Entry, entry, file, folder, link
from tests.e2e.test_build import APPLETS, BUSYBOX, Built, assert_clean, build
from tests.images import Layout, on, registry, skopeo, write_settings

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a base with its files' owners can only be unpacked by root"),
    pytest.mark.skipif(BUSYBOX is None, reason="the tiny base needs a static busybox"),
]
CONFIG = {
    "Env": ["PATH=/bin", "GREETING=hello there"],
    "WorkingDir": "/srv/app",
    "User": "app:staff",
    "Cmd": ["serve"],
    "Labels": {"org.example.team": "evals"},
}
RECIPE = """
version: 1
name: from-image
base: {{image: "docker://{host}/team/tiny:1"}}
machine: {{memory: 256MiB, disk: 64MiB}}
env: {{MORE: "1"}}
steps:
  - run: 'test "$GREETING/$MORE" = "hello there/1"; test "$PWD" = /srv/app; test "$(id -un):$(id -gn)" = app:staff'
  - {{verify: 'test ! -e /srv/hidden; test -s /srv/shown; test "$(stat -c %u:%g:%a /srv/shown)" = 1000:50:4755'}}
"""


def layers() -> tuple[list[Entry], list[Entry]]:
    assert BUSYBOX is not None
    program = entry("bin/busybox", data=Path(BUSYBOX).resolve().read_bytes(), mode=0o755)
    names = ("bin", "etc", "srv", "tmp", "root", "run")
    lower = [*(folder(name) for name in names), program, file("srv/hidden", "x")]
    lower += [link(f"bin/{applet}", "busybox") for applet in (*APPLETS, "id", "stat")]
    lower.append(file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/srv:/bin/sh\n"))
    lower.append(file("etc/group", "root:x:0:\nstaff:x:50:\n"))
    upper = [file("srv/.wh.hidden"), file("srv/shown", "y", uid=1000, gid=50, mode=0o4755)]
    return lower, upper


def snapshot(place: Path, built: Built) -> Snapshot:
    assert built.code == 0, built.err
    outputs = built.result["outputs"]
    assert isinstance(outputs, list)
    return open_repository(None, Home(place / "h")).snapshot(SnapshotId(outputs[0]["snapshot_id"]))


async def test_an_image_is_built_and_booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built twice from nothing, its disk layer is the same; with the registry gone, a pinned base is a hit."""
    monkeypatch.setenv("HOME", str(tmp_path))
    layout = Layout(tmp_path / "layout")
    image = layout.image(*layers(), config=CONFIG)
    layout.name("x", layout.index(on(image, "amd64")))
    (tmp_path / "registry").mkdir()
    with registry(tmp_path / "registry") as host:
        write_settings(tmp_path, host)
        skopeo("copy", "--all", f"oci:{layout.folder}:x", f"docker://{host}/team/tiny:1")
        recipe = RECIPE.format(host=host)
        first = snapshot(tmp_path, await build(tmp_path, recipe, "--json"))
        again = snapshot(tmp_path, await build(tmp_path, recipe, "--json", "--no-cache"))
    assert first.disk[0] == again.disk[0]
    assert (first.context.workdir, first.context.user) == ("/srv/app", "app:staff")
    assert first.context.env == {"PATH": "/bin", "GREETING": "hello there", "MORE": "1"}
    assert first.labels == {
        "org.example.team": "evals",
        "aenv.image.cmd": '["serve"]',
        "aenv.image.digest": image["digest"],
    }

    pinned = await build(tmp_path, recipe.replace("tiny:1", f"tiny@{image['digest']}"), "--json")
    assert snapshot(tmp_path, pinned).disk[0] == first.disk[0] and pinned.result["misses"] == 0
    moved = await build(tmp_path, recipe, "--json")
    assert moved.code == 68 and "cannot be reached" in moved.err and ":4:15: cannot get the image" in moved.err
    assert_clean(tmp_path)
    shutil.rmtree(tmp_path / "h")
