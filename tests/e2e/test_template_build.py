"""A template by the API, built by aenv-build on a real machine. Needs a driver, and root for a base."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from pathlib import Path

import httpx
import pytest

from aenv_run.api.app import make_app
from aenv_run.api.server import open_server
from aenv_run.api.settings import Settings
from aenv_run.paths import Home
from aenv_run.types import SnapshotId
from tests.e2e.test_build import BUSYBOX, assert_clean
from tests.e2e.test_dockerfile_build import base, files

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a base with its files' owners can only be unpacked by root"),
    pytest.mark.skipif(BUSYBOX is None, reason="the tiny base needs a static busybox"),
]
HASH = "0" * 64


def archive() -> bytes:
    """As an SDK packs ``app``."""
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w:gz") as tar:
        for name, mode in (("app/run.sh", 0o755), ("app/sub/data", 0o600)):
            member = tarfile.TarInfo(name)
            member.size, member.mode = 3, mode
            tar.addfile(member, io.BytesIO(b"hi\n"))
        member = tarfile.TarInfo("app/link")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    return packed.getvalue()


STEPS = [
    {"type": "ENV", "args": ["WHO", "app", "PATH", "/opt:$PATH"]},
    {"type": "WORKDIR", "args": ["/srv/work"]},
    {"type": "COPY", "args": ["app", "/srv/app", "app:staff", ""], "filesHash": HASH},
    {"type": "RUN", "args": ["echo $WHO $PATH $(id -un) > told"]},
    {"type": "USER", "args": ["app"]},
]


async def test_a_template_is_built_started_and_known_again(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    settings = Settings.model_validate(
        {"images": {"tiny": base(tmp_path)}, "template_internet": False, "template_disk_mib": 64}
    )
    server = open_server(settings, home)
    transport = httpx.ASGITransport(make_app(settings, server), raise_app_exceptions=False)
    key = {"X-API-Key": server.keys.api_key}
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=key) as http:

        async def build() -> tuple[dict[str, object], str]:
            asked = {"name": "made", "cpuCount": 1, "memoryMB": 256}
            build_id = (await http.post("/v3/templates", json=asked)).json()["buildID"]
            link = (await http.get(f"/templates/made/files/{HASH}")).json()
            if not link["present"]:
                assert (await http.put(link["url"], content=archive())).status_code == 200
            body = {"fromImage": "tiny", "steps": STEPS, "startCmd": "echo up > /tmp/up; sleep 600"}
            body["readyCmd"] = "test -s /tmp/up"
            answer = await http.post(f"/v2/templates/made/builds/{build_id}", json=body)
            assert answer.status_code == 202, answer.text
            while True:
                told = (await http.get(f"/templates/made/builds/{build_id}/status")).json()
                if told["status"] in {"ready", "error"}:
                    return told, build_id
                await asyncio.sleep(0.1)

        told, build_id = await build()
        assert told["status"] == "ready", told
        catalog = await server.catalog()
        made = catalog.resolve("made").snapshot_id
        again, second = await build()
        log = [entry["message"] for entry in again["logEntries"]]  # type: ignore[attr-defined]
        assert "6 steps, 6 of them cached" in log and catalog.resolve("made").snapshot_id == made
        assert server.builds.records.read(second).version == server.builds.records.read(build_id).version == 1
    await server.builds.close()
    assert_clean(tmp_path)
    snapshot = catalog.repository.snapshot(SnapshotId(made))
    assert snapshot.memory is not None and (snapshot.context.user, snapshot.context.workdir) == (
        "app",
        "/srv/work",
    )
    found = await files(tmp_path, snapshot)
    assert {path: said for path, said in found.items() if path.startswith("/srv/")} == {
        "/srv/app": "d755 1000:50",
        "/srv/app/run.sh": "-755 1000:50 hi",
        "/srv/app/sub": "d755 1000:50",
        "/srv/app/sub/data": "-600 1000:50 hi",
        "/srv/app/link": "l777 1000:50 /etc/passwd",
        "/srv/work": "d755 0:0",
        "/srv/work/told": "-644 0:0 app /opt:/bin root",
    }
