"""The HTTP API: snapshots, metrics, logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_run.api.sandboxes.samples import KEPT_S, Samples
from aenv_run.api.sandboxes.sampling import sampling, take_samples
from aenv_run.api.sandboxes.snapshots import delete_snapshot
from aenv_run.api.wire.watch import SandboxMetric
from aenv_run.guest import GuestMetrics
from aenv_run.sandbox_log import MAX_LOG_BYTES, SandboxLog
from tests.unit.api_site import ApiSite, api_site, refused
from tests.unit.node_site import Site


@pytest.fixture
async def api(site: Site) -> AsyncIterator[ApiSite]:
    """A server without limits."""
    async with api_site(site) as made:
        yield made


async def snapshot(api: ApiSite, made: dict[str, object], **body: object) -> dict[str, object]:
    answer = await api.http.post(f"/sandboxes/{made['sandboxID']}/snapshots", json=body)
    assert answer.status_code == 201, answer.text
    told: dict[str, object] = answer.json()
    return told


async def listed(api: ApiSite, **query: object) -> list[object]:
    answer = await api.http.get("/snapshots", params={key: str(value) for key, value in query.items()})
    assert answer.status_code == 200, answer.text
    return [row["snapshotID"] for row in answer.json()]


async def test_a_snapshot_is_launched_by_id_and_by_each_of_its_names(api: ApiSite) -> None:
    made = await api.create()
    (machine,) = api.site.engine.machines.values()
    machine.memory["own"] = "first"
    first = await snapshot(api, made, name="me/Kept:stable")
    machine.memory["own"] = "second"
    second = await snapshot(api, made, name="me/Kept")
    assert first["names"] == ["me--kept:1"] and second["names"] == ["me--kept:2"]
    assert first["cpuCount"] == 1 and first["memoryMB"] == 512
    for reference, own in {
        str(first["snapshotID"]): "first",
        "me/kept:stable": "first",
        "me/kept:1": "first",
        "ME/kept": "second",
        str(second["snapshotID"]): "second",
    }.items():
        child = await api.create(templateID=reference)
        assert list(api.site.engine.machines.values())[-1].memory["own"] == own, reference
        assert child["templateID"] == (reference if "/" not in reference else "me--kept")
    for wrong in ("a" * 64, "kept:1", "a b", "../x", ""):
        refused(await api.http.post(f"/sandboxes/{made['sandboxID']}/snapshots", json={"name": wrong}), 400)


async def test_snapshots_outlive_their_sandbox_until_they_are_removed(api: ApiSite) -> None:
    made, other = await api.create(), await api.create()
    named = await snapshot(api, made, name="kept")
    machine = next(iter(api.site.engine.machines.values()))
    machine.memory["own"] = "yes"
    bare = await snapshot(api, made, memory=False)
    theirs = await snapshot(api, other)
    assert bare["names"] == []
    assert (await api.http.delete(f"/sandboxes/{made['sandboxID']}")).status_code == 204
    ids = {named["snapshotID"], bare["snapshotID"], theirs["snapshotID"]}
    assert set(await listed(api)) == ids  # tiny is none: a build made it
    assert set(await listed(api, sandboxID=made["sandboxID"])) == {named["snapshotID"], bare["snapshotID"]}
    assert await listed(api, name="kept") == await listed(api, name="kept:1") == [named["snapshotID"]]
    assert await listed(api, name="../x") == []
    pages: list[object] = []
    token = ""
    while len(pages) < 4:
        answer = await api.http.get("/snapshots", params={"limit": 1, **({"nextToken": token} if token else {})})
        pages += [row["snapshotID"] for row in answer.json()]
        if not (token := answer.headers.get("x-next-token", "")):
            break
    assert len(pages) == 3 and set(pages) == ids
    assert "nextToken" in refused(await api.http.get("/snapshots?nextToken=x"), 400)
    for reference in (named["snapshotID"], "kept", "kept:1"):
        assert (await api.http.get(f"/snapshots/{reference}")).json() == named
    for unknown in ("tiny", "none", "a" * 64, "a%20b"):
        assert "was not found" in refused(await api.http.get(f"/snapshots/{unknown}"), 404)
    assert (
        await delete_snapshot(api.server, "tiny") is False and await delete_snapshot(api.server, "../x") is False
    )
    child = await api.create(templateID=named["snapshotID"])
    assert await delete_snapshot(api.server, str(named["snapshotID"])) is True
    assert await delete_snapshot(api.server, "kept") is False
    assert set(await listed(api)) == ids - {named["snapshotID"]}
    assert (await api.get(child["sandboxID"]))["state"] == "running"
    gone = await api.http.post("/v2/sandboxes", json={"templateID": named["snapshotID"]})
    assert "was deleted" in refused(gone, 404)
    twice = [await snapshot(api, other, name="twice") for _ in range(2)]
    machine.memory["own"] = "other"
    assert {str(one["snapshotID"]) for one in twice} <= set(await listed(api))
    assert await delete_snapshot(api.server, "twice") is True
    assert await listed(api, name="twice") == []
    cold = await api.create(templateID=bare["snapshotID"])
    assert (await api.server.node.get(str(cold["sandboxID"]))).origin == "booted"


async def test_an_unknown_template_is_told_with_names_that_somebody_gave(api: ApiSite) -> None:
    await snapshot(api, await api.create())
    message = refused(await api.http.post("/v2/sandboxes", json={"templateID": "none"}), 404)
    assert message.endswith("there are tiny"), message


async def test_a_paused_sandbox_is_not_snapshotted(api: ApiSite) -> None:
    made = await api.create()
    await api.http.post(f"/sandboxes/{made['sandboxID']}/pause")
    assert "is paused" in refused(await api.http.post(f"/sandboxes/{made['sandboxID']}/snapshots", json={}), 409)


async def test_metrics_are_what_the_guest_says_now(api: ApiSite) -> None:
    made, paused = await api.create(), await api.create()
    await api.http.post(f"/sandboxes/{paused['sandboxID']}/pause")
    url = f"/sandboxes/{made['sandboxID']}/metrics"
    (metric,) = (await api.http.get(url)).json()
    assert (metric["cpuUsedPct"], metric["memUsed"], metric["memTotal"], metric["diskTotal"]) == (5.5, 7, 9, 0)
    assert abs(metric["timestampUnix"] - time.time()) < 60
    assert (await api.http.get(url, params={"end": 5})).json() == []
    assert (await api.http.get(url, params={"start": int(time.time()) + 900})).json() == []
    assert (await api.http.get(f"/sandboxes/{paused['sandboxID']}/metrics")).json() == []
    ids = f"{made['sandboxID']},{paused['sandboxID']},nobody"
    several = (await api.http.get("/sandboxes/metrics", params={"sandbox_ids": ids})).json()
    assert set(several["sandboxes"]) == {made["sandboxID"]}
    refused(await api.http.get("/sandboxes/metrics"), 400)
    refused(await api.http.get("/sandboxes/metrics", params={"sandbox_ids": ",".join(map(str, range(101)))}), 400)


async def test_what_was_noted_of_sandboxes_is_told_until_they_are_gone(api: ApiSite) -> None:
    made, paused = await api.create(), await api.create()
    for _ in range(2):
        await take_samples(api.server)
    await api.http.post(f"/sandboxes/{paused['sandboxID']}/pause")
    await take_samples(api.server)
    url, other = (f"/sandboxes/{one['sandboxID']}/metrics" for one in (made, paused))
    found = (await api.http.get(url)).json()
    assert len(found) == 4 and {one["memUsed"] for one in found} == {7}
    assert [one["timestampUnix"] for one in found] == sorted(one["timestampUnix"] for one in found)
    assert len((await api.http.get(other)).json()) == 2
    now = int(time.time())
    assert len((await api.http.get(other, params={"start": now - 60, "end": now + 60})).json()) == 2
    assert (await api.http.get(other, params={"end": now - 60})).json() == []
    await api.http.delete(f"/sandboxes/{paused['sandboxID']}")
    await take_samples(api.server)
    assert api.server.samples.between(str(paused["sandboxID"]), None, None) == []


def test_values_are_kept_for_an_hour() -> None:
    samples, guest = Samples(), GuestMetrics()
    for at_s in (0, 10, KEPT_S + 5):
        samples.add("s", SandboxMetric.of(guest, 1, at_s))
    assert [one.timestamp_unix for one in samples.between("s", None, None)] == [10, KEPT_S + 5]
    assert [one.timestamp_unix for one in samples.between("s", 0, 10)] == [10]


async def test_it_is_noted_as_often_as_the_settings_say(site: Site) -> None:
    async with api_site(site, metrics_every_s=0.01) as api, sampling(api.server):
        made = await api.create()
        async with asyncio.timeout(60):
            while len(api.server.samples.between(str(made["sandboxID"]), None, None)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_log_says_what_happened(api: ApiSite) -> None:
    made = await api.create()
    await api.http.post(f"/sandboxes/{made['sandboxID']}/fork", json={})
    await api.http.post(f"/sandboxes/{made['sandboxID']}/pause")
    await api.http.post(f"/v2/sandboxes/{made['sandboxID']}/connect", json={})
    url = f"/v2/sandboxes/{made['sandboxID']}/logs"

    async def lines(**query: str) -> list[str]:
        return [entry["message"] for entry in (await api.http.get(url, params=query)).json()["logs"]]

    everything = [
        "started (restored)",
        "forked",
        "paused with its memory",
        "resumed (restored)",
        "last console line",
    ]
    assert await lines() == everything and await lines(direction="backward") == everything[::-1]
    assert await lines(limit="2") == everything[:2] and await lines(search="use") == ["paused with its memory"]
    assert await lines(level="error") == [] and await lines(cursor=str(2**52)) == []
    assert await lines(cursor=str(2**52), direction="backward", limit="1") == everything[-1:]
    entries = (await api.http.get(url)).json()["logs"]
    assert [entry["fields"]["source"] for entry in entries] == ["node"] * 4 + ["console"]
    v1 = (await api.http.get(f"/sandboxes/{made['sandboxID']}/logs", params={"limit": "3"})).json()
    assert [line["line"] for line in v1["logs"]] == everything[:3] == [e["message"] for e in v1["logEntries"]]
    refused(await api.http.get(url, params={"direction": "up"}), 400)
    refused(await api.http.get(url, params={"limit": "1001"}), 400)


def test_a_log_is_bounded_and_survives_half_a_line(tmp_path: Path) -> None:
    log = SandboxLog(tmp_path)
    for number in range(400):
        log.add(f"{number} " + "x" * 1990, "warn", note="n")
    files = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(files) == 2 and sum(files) <= 2 * (MAX_LOG_BYTES + 4096)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"at_s": 1, "mess\n\xff\n[]\n')
    entries = log.read()
    assert entries[-1].message.startswith("399 ") and entries[-1].level == "warn" and len(entries) > 60
    assert SandboxLog(tmp_path / "none").read() == []
    SandboxLog(tmp_path / "none").add("nobody reads it")
