"""Dockerfiles built on real machines: what is on the disk then, file by file. Needs a driver, and root."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from aenv_run import disk_listing
from aenv_run.cache import BlobCache
from aenv_run.catalog import Catalog
from aenv_run.config import open_repository
from aenv_run.ext4 import Ext4
from aenv_run.paths import Home
from aenv_run.snapshot import Snapshot
from tests.cases.image_layers import Entry, entry, file, folder, link
from tests.e2e.test_build import APPLETS, BUSYBOX, assert_clean
from tests.images import Layout, on

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a base with its files' owners can only be unpacked by root"),
    pytest.mark.skipif(BUSYBOX is None, reason="the tiny base needs a static busybox"),
]
STAGES = """
ARG BASE=tiny
FROM ${BASE} AS build
ARG GREETING=hello
WORKDIR /src
COPY . .
RUN cat parts/a parts/b > /out && chmod 0751 /out && ln -s out /link && echo "$GREETING" > /greeting

FROM scratch
COPY --from=build /bin/busybox /bin/busybox
COPY --from=build --chown=7:8 /out /srv/
COPY --from=build /greeting /srv/told
RUN ["/bin/busybox", "touch", "/srv/touched"]
"""
ONE = """
FROM tiny
ENV PATH=/opt/bin:$PATH WHO=app
RUN mkdir -p /opt/bin && printf '#!/bin/sh\\necho tool' > /opt/bin/tool && chmod 755 /opt/bin/tool
WORKDIR /srv/app
COPY --chown=app:staff --chmod=640 parts/a parts/b ./parts/
USER app
RUN <<EOF
set -e
echo "$WHO $PATH $(id -un) $PWD $(tool)" > /data/app/seen
EOF
COPY <<EOF /srv/app/conf
who=$WHO
EOF
"""


def base(place: Path) -> str:
    """A tiny image with a user; its name."""
    assert BUSYBOX is not None
    program = entry("bin/busybox", data=Path(BUSYBOX).resolve().read_bytes(), mode=0o755)
    names = ("bin", "etc", "srv", "tmp", "root", "run", "data")
    entries: list[Entry] = [*(folder(name) for name in names), program]
    entries += [link(f"bin/{applet}", "busybox") for applet in {*APPLETS, "id", "chmod", "ln", "printf", "touch"}]
    entries += [folder("data/app", uid=1000, gid=50)]
    entries.append(file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\napp:x:1000:50::/data/app:/bin/sh\n"))
    entries.append(file("etc/group", "root:x:0:\nstaff:x:50:\n"))
    layout = Layout(place / "layout")
    layout.name("x", layout.index(on(layout.image(entries, config={"Env": ["PATH=/bin"]}), "amd64")))
    return f"oci:{layout.folder}:x"


async def run(*arguments: str) -> None:
    """aenv-build, which must succeed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aenv_build.cli", *arguments, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()


async def files(place: Path, snapshot: Snapshot) -> dict[str, str]:
    """Each file of the disk: mode, owner, and content or target."""
    home = Home(place / "h")
    cache = BlobCache(home.cache, open_repository(None, home))
    flat = place / "flat.img"
    await disk_listing.flat_disk(tuple(map(cache.path, snapshot.disk)), snapshot.machine.disk_mib, flat)
    found = {}
    with Ext4(flat) as source:
        for path, listed in disk_listing.list_files(source).items():
            inode, shown = listed.inode, listed.target.decode()
            if inode.kind == disk_listing.REGULAR:
                shown = source.read(inode, 1 << 12).decode() if inode.size < 1 << 12 else "…"
            kind = "d" if inode.kind == disk_listing.DIRECTORY else "l" if inode.kind == disk_listing.LINK else "-"
            found[path.decode()] = f"{kind}{inode.mode & 0o7777:o} {inode.uid}:{inode.gid} {shown}".strip()
    flat.unlink()
    return found


async def built(place: Path, dockerfile: str) -> tuple[Snapshot, dict[str, str]]:
    """Translate and build it."""
    context = place / "context"
    (context / "parts").mkdir(parents=True)
    for name in ("a", "b", "ignored"):
        (context / "parts" / name).write_text(f"{name}\n")
    (context / ".dockerignore").write_text("parts/ignored\nDockerfile\n.dockerignore\n")
    (context / "Dockerfile").write_text(dockerfile)
    recipe = str(place / "recipe.yaml")
    how = ("--name", "made", "--image", f"tiny={base(place)}", "--no-network")
    sizes = ("--machine-memory", "256MiB", "--disk", "64MiB")
    await run("from-dockerfile", str(context), "-o", recipe, *how, *sizes)
    await run(recipe, "--home", str(place / "h"), "--json")
    assert_clean(place)
    catalog = Catalog(open_repository(None, Home(place / "h")))
    snapshot = catalog.repository.snapshot(catalog.resolve("made:latest").snapshot_id)
    return snapshot, await files(place, snapshot)


async def test_stages_end_in_a_disk_of_what_was_copied_alone(tmp_path: Path) -> None:
    _, found = await built(tmp_path, STAGES)
    for name in ("/lost+found", "/dev", "/proc", "/sys", "/run", "/tmp", "/etc"):  # what every machine's disk has
        found = {path: said for path, said in found.items() if path != name and not path.startswith(f"{name}/")}
    assert found == {
        "/bin": "d755 0:0",
        "/bin/busybox": "-755 0:0 …",
        "/srv": "d755 7:8",
        "/srv/out": "-751 7:8 a\nb",
        "/srv/told": "-644 0:0 hello",
        "/srv/touched": "-644 0:0",
    }


async def test_users_modes_and_variables_are_those_of_the_dockerfile(tmp_path: Path) -> None:
    snapshot, found = await built(tmp_path, ONE)
    assert snapshot.context.env == {"PATH": "/opt/bin:/bin", "WHO": "app"}
    assert (snapshot.context.user, snapshot.context.workdir) == ("app", "/srv/app")
    shown = {path: said for path, said in found.items() if path.startswith(("/opt", "/srv/", "/data/app/"))}
    assert shown == {
        "/opt": "d755 0:0",
        "/opt/bin": "d755 0:0",
        "/opt/bin/tool": "-755 0:0 #!/bin/sh\necho tool",
        "/srv/app": "d755 0:0",
        "/srv/app/parts": "d755 1000:50",
        "/srv/app/parts/a": "-640 1000:50 a",
        "/srv/app/parts/b": "-640 1000:50 b",
        "/srv/app/conf": "-644 0:0 who=app",
        "/data/app/seen": "-644 1000:50 app /opt/bin:/bin app /srv/app tool",
    }
