"""The template endpoints, over a builder that is a program of its own."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tarfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from aenv_run.api.server import open_server
from aenv_run.api.settings import Settings
from aenv_run.api.templates.lifespan import builds as lifespan
from aenv_run.api.templates.records import Line
from aenv_run.api.templates.start import build_image, wait
from aenv_run.errors import InvalidInput, LimitReached, NotFound, TooLarge
from aenv_run.process import read_start_ticks
from aenv_run.types import Name
from tests.unit.api_site import ApiSite, api_site, refused
from tests.unit.node_site import Site

BUILDER = (sys.executable, str(Path(__file__).with_name("pretend_builder.py")))
HASH = "a" * 64
OVER = {"ready", "error"}


@asynccontextmanager
async def serving(site: Site, **settings: object) -> AsyncIterator[ApiSite]:
    """A server with the pretended builder, which is ended with it."""
    async with api_site(site, **settings) as api:
        api.server.builds.builder = BUILDER
        async with lifespan(api.server):
            yield api


async def begin(api: ApiSite, *steps: dict[str, object], name: str = "made", **more: object) -> str:
    """A build of these steps, started; its id."""
    answer = await api.http.post("/v3/templates", json={"name": name})
    assert answer.status_code == 202, answer.text
    build_id = str(answer.json()["buildID"])
    body = {"fromImage": "debian:12", "steps": list(steps), **more}
    template = answer.json()["templateID"]
    answer = await api.http.post(f"/v2/templates/{template}/builds/{build_id}", json=body)
    assert (answer.status_code, answer.content) == (202, b""), answer.text
    return build_id


async def ended(api: ApiSite, build_id: str, name: str = "made") -> dict[str, object]:
    """As an SDK waits for it: until it is over and no more lines come. ``lines`` are all of them."""
    lines: list[dict[str, object]] = []
    async with asyncio.timeout(60):
        while True:
            url = f"/templates/{name}/builds/{build_id}/status"
            answer = await api.http.get(url, params={"logsOffset": len(lines)})
            assert answer.status_code == 200, answer.text
            told: dict[str, object] = answer.json()
            new = told["logEntries"]
            assert isinstance(new, list) and len(new) <= 100
            lines += new
            if told["status"] in OVER and not new:
                return {**told, "lines": lines}
            await asyncio.sleep(0.05)


def run(command: str) -> dict[str, object]:
    return {"type": "RUN", "args": [command]}


async def test_a_template_from_its_request_to_its_removal(site: Site) -> None:
    async with serving(site) as api:
        build_id = await begin(api, run("talk"), run("more"), name="Made:v1")
        assert str(uuid.UUID(build_id)) == build_id
        told = await ended(api, build_id)
        assert told["status"] == "ready" and "reason" not in told
        said = [line["message"] for line in told["lines"]]  # type: ignore[attr-defined]
        assert "RUN talk" in said and said.count("line 249") == 1 and said[-1] == "Build finished"
        assert {line.get("step") for line in told["lines"]} == {None, "1", "2"}  # type: ignore[attr-defined]
        (row,) = [row for row in (await api.http.get("/templates")).json() if row["templateID"] == "made"]
        assert (row["buildID"], row["buildStatus"], row["names"], row["buildCount"]) == (
            build_id,
            "ready",
            ["made"],
            1,
        )
        detail = (await api.http.get("/templates/made")).json()
        assert [build["buildID"] for build in detail["builds"]] == [build_id]
        assert (await api.http.get("/templates/aliases/made")).json() == {"templateID": "made", "public": False}
        answer = await api.http.post("/templates/tags", json={"target": "made:v1", "tags": ["stable"]})
        assert (answer.status_code, answer.json()) == (201, {"tags": ["stable"], "buildID": build_id})
        tags = (await api.http.get("/templates/made/tags")).json()
        assert [(tag["tag"], tag["buildID"]) for tag in tags] == [("stable", build_id), ("v1", build_id)]
        made = await api.create(templateID="made:stable")
        assert made["templateID"] == "made"
        body = {"name": "made", "tags": ["stable"]}
        assert (await api.http.request("DELETE", "/templates/tags", json=body)).status_code == 204
        refused(await api.http.request("DELETE", "/templates/tags", json=body), 404)
        assert (await api.http.delete("/templates/made")).status_code == 204
        refused(await api.http.delete("/templates/made"), 404)
        refused(await api.http.get("/templates/aliases/made"), 404)
        refused(await api.http.get(f"/templates/made/builds/{build_id}/status"), 404)


async def test_a_failing_step_is_named_by_its_number(site: Site) -> None:
    async with serving(site) as api:
        told = await ended(api, await begin(api, run("ok"), run("fail")))
        assert (told["status"], told["reason"]) == ("error", {"message": "exited with 3", "step": "2"})
        told = await ended(api, await begin(api, run("late")))
        assert told["reason"] == {"message": "the disk is full (free some)", "step": "finalize"}
        said = [line["message"] for line in told["lines"]]  # type: ignore[attr-defined]
        assert said[-2:] == ["the disk is full (free some)", "Build failed"] and "/" not in " ".join(said)
        told = await ended(api, await begin(api, run("die")))
        assert told["status"] == "error" and "said nothing" in str(told["reason"])
        assert [row["buildStatus"] for row in (await api.http.get("/v2/templates?limit=1")).json()] == ["error"]


async def put(api: ApiSite, data: bytes, template: str = "made", hash: str = HASH) -> httpx.Response:
    link = await api.http.get(f"/templates/{template}/files/{hash}")
    assert link.status_code == 201 and set(link.json()) == {"present", "url"}
    return await api.bare.put(link.json()["url"].removeprefix("http://api"), content=data)


async def test_an_archive_is_uploaded_once_and_copied(site: Site) -> None:
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w:gz") as tar:
        member = tarfile.TarInfo("app/main.py")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"main"))
    copy = {"type": "COPY", "args": ["app", "/srv", "", ""], "filesHash": HASH}
    async with serving(site) as api:
        refused(await api.http.get(f"/templates/made/files/{HASH}"), 404)
        build_id = (await api.http.post("/v3/templates", json={"name": "made"})).json()["buildID"]
        start = f"/v2/templates/made/builds/{build_id}"
        body = {"fromImage": "x", "steps": [copy]}
        assert "is not here" in refused(await api.http.post(start, json=body), 400)
        assert not (await api.http.get(f"/templates/made/files/{HASH}")).json()["present"]
        assert (await put(api, packed.getvalue())).status_code == 200
        assert (await api.http.get(f"/templates/made/files/{HASH}")).json()["present"]
        assert (await api.http.post(start, json=body)).status_code == 202
        assert (await ended(api, build_id))["status"] == "ready"
        assert "before" in refused(await api.http.post(start, json=body), 400)
        folder = site.home.template_builds / build_id
        recipe = json.loads((folder / "recipe.yaml").read_text())
        assert recipe["steps"][0]["copy"]["to"] == "/srv" and recipe["steps"][0]["copy"]["unpack"]
        assert not (folder / "context").exists(), "what is built is not kept twice"


async def test_uploads_need_their_token_and_their_length(site: Site) -> None:
    async with serving(site, max_upload_bytes=1 << 20) as api:
        await api.http.post("/v3/templates", json={"name": "made"})
        url = (await api.http.get(f"/templates/made/files/{HASH}")).json()["url"].removeprefix("http://api")
        other = url.replace(HASH, "b" * 64)
        refused(await api.bare.put(other, content=b"x"), 403)
        refused(await api.bare.put(url.partition("?")[0], content=b"x"), 403)
        refused(await api.bare.put(url + "0", content=b"x"), 403)

        async def pieces() -> AsyncIterator[bytes]:
            yield b"x"

        refused(await api.bare.put(url, content=pieces()), 411)
        refused(await api.bare.put(url, content=pieces(), headers={"Content-Length": "2"}), 400)
        refused(await api.bare.put(url, content=b"x" * ((1 << 20) + 1)), 413)
        assert list(site.home.template_files.iterdir()) == [], "nothing is left of what was refused"
        old = api.server.archives.token(HASH, now_s=1)
        refused(await api.bare.put(f"/template-files/{HASH}?token={old}", content=b"x"), 403)


async def test_uploads_on_their_way_count_and_older_ones_give_way(site: Site) -> None:
    mib = 1 << 20
    async with serving(site, max_uploads_bytes=3 * mib) as api:
        archives, sent = api.server.archives, asyncio.Event()

        async def held(size_bytes: int) -> AsyncIterator[bytes]:
            await sent.wait()
            yield bytes(size_bytes)

        async def whole(size_bytes: int) -> AsyncIterator[bytes]:
            yield bytes(size_bytes)

        for name in ("1", "2"):
            await archives.put(name * 64, whole(mib), mib)
        os.utime(archives.path("1" * 64), (1, 1))
        slow = asyncio.create_task(archives.put("3" * 64, held(2 * mib), 2 * mib))
        async with asyncio.timeout(60):
            while archives.path("1" * 64).exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert archives.has("2" * 64), "no more goes than room is needed"
        with pytest.raises(LimitReached):
            await archives.put("4" * 64, whole(2 * mib), 2 * mib)
        sent.set()
        await slow
        await archives.put("4" * 64, whole(2 * mib), 2 * mib)
        assert sorted(path.stat().st_size for path in site.home.template_files.iterdir()) == [2 * mib]
        with pytest.raises(TooLarge):
            await archives.put("5" * 64, whole(0), 4 * mib)


async def test_a_build_that_was_not_started_can_be_asked_for_again(site: Site) -> None:
    copy = {"type": "COPY", "args": ["app", "/srv"], "filesHash": HASH}
    missing = {**copy, "filesHash": "b" * 64}
    async with serving(site) as api:
        build_id = (await api.http.post("/v3/templates", json={"name": "made"})).json()["buildID"]
        await put(api, b"no archive" * 100)
        start, folder = f"/v2/templates/made/builds/{build_id}", site.home.template_builds / build_id
        refused(await api.http.post(start, json={"fromImage": "x", "steps": [copy, missing]}), 400)
        assert not (folder / "context").exists()
        assert (await api.http.post(start, json={"fromImage": "x", "steps": [copy]})).status_code == 202
        await ended(api, build_id)


async def test_the_log_is_read_on_from_where_a_reader_was(site: Site) -> None:
    records = open_server(Settings(), site.home).builds.records
    build_id = records.new(Name("made"), (), cpus=1, memory_mib=512, disk_mib=64).build_id
    path = records.folder(build_id) / "log.jsonl"
    records.say(build_id, Line(at_s=1, message="one"))
    with path.open("ab") as file:
        file.write(b'{"at_s":2,"mess')  # what a kill leaves
    for word in ("two", "three"):
        records.say(build_id, Line(at_s=3, message=word, level="warn"))
    for offset, found in ((0, ["one", "two", "three"]), (1, ["two", "three"]), (2, ["three"]), (3, [])):
        assert [line.message for line in records.lines(build_id, offset=offset)] == found
    assert [line.message for line in records.lines(build_id, offset=1, level="warn")] == ["three"]


async def test_an_archive_that_is_none_fails_its_step(site: Site) -> None:
    copy = {"type": "COPY", "args": ["app", "/srv"], "filesHash": HASH}
    async with serving(site) as api:
        await api.http.post("/v3/templates", json={"name": "made"})
        await put(api, b"no archive" * 100)
        told = await ended(api, await begin(api, run("ok"), copy))
        assert told["status"] == "error" and told["reason"]["step"] == "2"  # type: ignore[index]


async def test_all_copies_together_fit_on_the_disk(site: Site) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:  # a few bytes that unpack to more than half of the disk
        member = tarfile.TarInfo("app")
        member.size = 40 << 20
        tar.addfile(member, io.BytesIO(bytes(40 << 20)))
    copy = {"type": "COPY", "args": ["app", "/srv/"], "filesHash": HASH}
    async with serving(site, template_disk_mib=64) as api:
        await api.http.post("/v3/templates", json={"name": "made"})
        await put(api, raw.getvalue())
        assert (await ended(api, await begin(api, copy)))["status"] == "ready"
        told = await ended(api, await begin(api, copy, copy))
        assert told["status"] == "error" and told["reason"]["step"] == "2"  # type: ignore[index]


async def test_credentials_are_in_no_file_that_stays_and_in_no_argument(site: Site) -> None:
    login = {"type": "registry", "username": "me", "password": "s3cr3t-word"}
    async with serving(site) as api:
        build_id = await begin(api, run("ok"), fromImage="reg.example/x:1", fromImageRegistry=login)
        told = await ended(api, build_id)
        folder = site.home.template_builds / build_id
        seen = json.loads((folder / "seen.json").read_text())
        auth = json.loads(seen["auth"])["auths"]
        assert list(auth) == ["reg.example"] and "AENV_API_KEY" not in seen["variables"]
        (folder / "seen.json").unlink()
        left = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
        for word in ("s3cr3t-word", auth["reg.example"]["auth"]):
            assert word not in left + json.dumps(told) + " ".join(seen["argv"])
        made = (await api.http.post("/v3/templates", json={"name": "made"})).json()
        for bad in (
            {"type": "aws", "awsAccessKeyId": "x"},
            {"type": "registry", "username": "me"},
            {**login, "username": "me:you"},
            {**login, "awsRegion": "x"},
            {**login, "serviceAccountJson": "{}"},
        ):
            body = {"fromImage": "x", "fromImageRegistry": bad}
            refused(await api.http.post(f"/v2/templates/made/builds/{made['buildID']}", json=body), 400)


async def test_builds_wait_for_their_turn_and_end_with_the_server(site: Site) -> None:
    async with serving(site, max_builds=1) as api:
        first, second = await begin(api, run("hang")), await begin(api, run("ok"), name="other")
        async with asyncio.timeout(60):
            while not (site.home.template_builds / first / "seen.json").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while api.server.builds.records.read(first).pid is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        told = (await api.http.get(f"/templates/other/builds/{second}/status")).json()
        assert (told["status"], told["logEntries"]) == ("waiting", [])
        pid = api.server.builds.records.read(first).pid
        assert pid is not None and Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
    async with serving(site) as api:
        for build_id, name in ((first, "made"), (second, "other")):
            told = await ended(api, build_id, name)
            assert told["status"] == "error" and "the server was stopped" in str(told["reason"])


async def test_a_build_of_a_server_that_was_killed_is_told_so(site: Site) -> None:
    async with serving(site) as api:
        build = api.server.builds.records.new(
            (await build_image(api.server, "debian:12", "made")).template, (), cpus=1, memory_mib=512, disk_mib=64
        )
        api.server.builds.records.change(
            build.build_id, started=True, status="building", pid=os.getpid(), start_ticks=1
        )
        await api.server.builds.recover()
        found = api.server.builds.records.read(build.build_id)
        assert (found.status, found.pid) == ("error", None) and "build again" in str(found.reason)


async def test_what_another_process_works_on_is_left_to_it(site: Site) -> None:
    records = open_server(Settings(), site.home).builds.records
    other, gone = os.getppid(), os.getpid()
    for pid, ticks in ((other, read_start_ticks(other)), (other, 1), (gone, read_start_ticks(gone))):
        build = records.new(Name("made"), (), cpus=1, memory_mib=512, disk_mib=64)
        records.change(build.build_id, started=True, status="building", owner_pid=pid, owner_ticks=ticks)
    async with serving(site):
        async with asyncio.timeout(60):
            while sum(build.status == "error" for build in records.all()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (kept,) = [build for build in records.all() if build.status == "building"]
    assert (kept.owner_pid, kept.owner_ticks) == (other, read_start_ticks(other))


async def test_a_template_that_another_process_builds_is_not_deleted(site: Site) -> None:
    async with serving(site) as api:
        records, other = api.server.builds.records, os.getppid()
        build = records.new(Name("made"), (), cpus=1, memory_mib=512, disk_mib=64)
        owner = {"owner_pid": other, "owner_ticks": read_start_ticks(other)}
        records.change(build.build_id, started=True, status="building", **owner)
        assert f"process {other}" in refused(await api.http.delete("/templates/made"), 409)
        assert records.read(build.build_id).status == "building"
        records.change(build.build_id, owner_ticks=1)
        assert (await api.http.delete("/templates/made")).status_code == 204


async def test_images_come_only_from_registries_that_are_named(site: Site) -> None:
    async with serving(site, registries=("reg.example:5000", "docker.io")) as api:
        for image in ("reg.example:5000/x:1", "debian:12", "team/app"):
            await build_image(api.server, image, "one")
        for image in ("reg.example/x", "169.254.169.254/x", "localhost/x", "docker.io.example/x"):
            with pytest.raises(InvalidInput, match="are not taken here"):
                await build_image(api.server, image, "two")


async def test_images_templates_and_settings(site: Site) -> None:
    async with serving(site, images={"e2bdev/base": "snapshot:tiny"}, template_internet=False) as api:
        done = await wait(api.server, (await build_image(api.server, "e2bdev/base", "one")).build_id)
        recipe = json.loads((site.home.template_builds / done.build_id / "recipe.yaml").read_text())
        assert done.status == "ready" and recipe["base"] == {"snapshot": "tiny"}
        assert recipe["machine"] == {"cpus": 2, "memory": "1024MiB", "internet": False}
        build_id = await begin(api, fromImage=None, fromTemplate="one:latest", startCmd="x", name="two")
        assert (await ended(api, build_id, "two"))["status"] == "ready"
        for image in ("oci:/etc", "archive:/etc/passwd", "../x", "a b"):
            with pytest.raises(InvalidInput, match="not an image of a registry"):
                await build_image(api.server, image, "three")
        with pytest.raises(NotFound):
            api.server.builds.records.read("../../etc")
        made = (await api.http.post("/v3/templates", json={"name": "three"})).json()
        start = f"/v2/templates/three/builds/{made['buildID']}"
        assert "nothing" in refused(await api.http.post(start, json={"fromTemplate": "nothing"}), 400)
        refused(await api.http.post(start, json={"fromTemplate": "one", "fromImage": "x"}), 400)
        refused(await api.http.post(start.replace("three", "one"), json={"fromImage": "x"}), 404)
        refused(await api.http.post("/v3/templates", json={"name": "a b"}), 400)
        refused(await api.http.post("/v3/templates", json={"name": "0123456789abcdef"}), 400)
        refused(await api.http.post("/v3/templates", json={"name": "x", "tags": ["1.0"]}), 400)
        refused(await api.http.patch("/templates/one", json={"public": True}), 501)


async def test_a_sandbox_of_an_image(site: Site) -> None:
    async with serving(site, template_disk_mib=2048) as api:
        body = {"image": "registry.example/team/debian:12", "secure": True, "metadata": {"a": "b"}}
        made = await api.http.post("/sandboxes-cold", json={**body, "cpuCount": 3, "diskSizeMB": 4096})
        assert made.status_code == 201 and made.json()["envdAccessToken"], made.text
        assert made.headers["x-agentenv-sandbox-id"] == made.json()["sandboxID"]
        name = str(made.json()["templateID"])
        assert name.startswith("image-debian-")
        (build,) = api.server.builds.records.all()
        recipe = json.loads((site.home.template_builds / build.build_id / "recipe.yaml").read_text())
        assert recipe["machine"]["cpus"] == 3 and build.disk_mib == 4096
        info = await api.server.node.get(str(made.json()["sandboxID"]))
        assert (info.timeout_s, info.on_timeout, info.metadata) == (15, "pause", {"a": "b"})
        again = await api.http.post("/sandboxes-cold", json={**body, "cpuCount": 3, "diskSizeMB": 4096})
        assert again.json()["templateID"] == name
        other = await api.http.post("/sandboxes-cold", json=body)
        assert other.status_code == 201 and other.json()["templateID"] != name
        both = await asyncio.gather(
            *(api.http.post("/sandboxes-cold", json={**body, "image": "debian:13"}) for _ in range(2))
        )
        assert [answer.status_code for answer in both] == [201, 201]
        name = str(both[0].json()["templateID"])
        assert len([build for build in api.server.builds.records.all() if build.template == name]) == 1
        for wrong in (
            {"image": "oci:/etc"},
            {**body, "diskSizeMB": 1024},
            {**body, "diskSizeMB": 1000},
            {**body, "attachedDrives": [{"driveID": "x"}]},
            {**body, "allow_internet_access": True},
            {},
        ):
            refused(await api.http.post("/sandboxes-cold", json=wrong), 400)


async def test_the_log_is_bounded(site: Site) -> None:
    async with serving(site) as api:
        records = api.server.builds.records
        build_id = await begin(api, run("ok"))
        await ended(api, build_id)
        path = records.folder(build_id) / "log.jsonl"
        path.write_bytes(path.read_bytes() + b"x" * (4 << 20))
        other = replace(api.server.builds)
        other.finish(build_id, "error", "because", "1")
        assert not records.say(build_id, Line(at_s=1, message="more"))
        assert path.read_bytes().endswith(b'"level":"error","step":"1"}\n') and path.stat().st_size < (4 << 20) + (
            64 << 10
        )


def test_a_server_opens_with_a_builder_of_its_own(site: Site) -> None:
    assert open_server(Settings(), site.home, builder=("x",)).builds.builder == ("x",)
