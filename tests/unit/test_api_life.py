"""The HTTP API: pause, resume, connect, times, network, forks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from aenv_run.lifecycle import State
from aenv_run.version import VERSION
from tests.unit.api_site import ApiSite, api_site, refused
from tests.unit.node_site import Site


@pytest.fixture
async def api(site: Site) -> AsyncIterator[ApiSite]:
    """A server without limits."""
    async with api_site(site) as made:
        yield made


async def post(api: ApiSite, made: dict[str, object], what: str, version: str = "", **body: object) -> int:
    """The status of an operation on a sandbox."""
    answer = await api.http.post(f"{version}/sandboxes/{made['sandboxID']}/{what}", json=body)
    if answer.status_code >= 400:
        refused(answer, answer.status_code)
    return answer.status_code


async def left_s(api: ApiSite, made: dict[str, object]) -> float:
    expires_at_s = (await api.server.node.get(str(made["sandboxID"]))).expires_at_s
    assert expires_at_s is not None
    return expires_at_s - time.time()


async def test_pause_and_connect(api: ApiSite) -> None:
    made = await api.create(timeout=1000)
    bare = await api.http.post(f"/sandboxes/{made['sandboxID']}/pause")  # older SDKs send no body
    assert bare.status_code == 204 and await post(api, made, "pause") == 409
    found = await api.get(made["sandboxID"])
    assert (
        found["state"] == "paused"
        and found["pauseMode"] == "full"
        and str(found["endAt"]).startswith("2070-01-01")
    )
    assert found["envdAccessToken"] == made["envdAccessToken"]
    assert (await api.http.get("/sandboxes")).json() == []
    assert len((await api.http.get("/v2/sandboxes?state=paused")).json()) == 1
    assert await post(api, made, "timeout", timeout=5) == 409 and await post(api, made, "fork") == 409
    answer = await api.http.post(f"/v2/sandboxes/{made['sandboxID']}/connect", json={})
    assert answer.status_code == 201 and answer.json()["envdAccessToken"] == made["envdAccessToken"]
    assert 290 < await left_s(api, made) <= 300
    assert await post(api, made, "connect", "/v2", timeout=2000) == 200 and await left_s(api, made) > 1900
    assert await post(api, made, "connect", "/v2", timeout=5) == 200 and await left_s(api, made) > 1900
    assert await post(api, made, "connect", timeout=5) == 200 and await post(api, made, "connect") == 400
    assert await post(api, made, "connect", "/v2", memory=False) == 409
    assert await post(api, made, "resume") == 201 and await post(api, made, "resume", autoPause=True) == 400
    assert await post(api, made, "pause") == 204 and await post(api, made, "resume") == 201
    assert 10 < await left_s(api, made) <= 15


async def test_a_pause_without_memory_is_a_cold_boot_later(api: ApiSite) -> None:
    made = await api.create()
    (machine,) = api.site.engine.machines.values()
    machine.memory["own"] = "yes"
    assert await post(api, made, "pause", memory=False) == 204
    info = await api.server.node.get(str(made["sandboxID"]))
    assert info.state is State.PAUSED and not info.has_memory
    assert (await api.get(made["sandboxID"]))["pauseMode"] == "filesystem"
    files = api.site.home.sandboxes / info.sandbox_id
    async with asyncio.timeout(10):
        while list((files / "memory").iterdir()) or (files / "capturing").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await post(api, made, "connect", "/v2") == 201
    (machine,) = api.site.engine.machines.values()
    info = await api.server.node.get(info.sandbox_id)
    assert "own" not in machine.memory and info.origin == "booted" and info.state is State.RUNNING


async def test_what_its_end_does(api: ApiSite) -> None:
    killed = await api.create()
    whole = await api.create(autoPause=True)
    disk = await api.create(autoPause=True, autoPauseMemory=False)
    for made in (killed, whole, disk):
        assert await post(api, made, "timeout", timeout=0) == 204
    await api.node.reap()
    await api.node.settled()
    assert "was not found" in refused(await api.http.get(f"/sandboxes/{killed['sandboxID']}"), 404)
    assert (await api.get(whole["sandboxID"]))["pauseMode"] == "full"
    assert (await api.get(disk["sandboxID"]))["pauseMode"] == "filesystem"
    await api.node.reap()
    await api.node.settled()
    assert len((await api.http.get("/v2/sandboxes")).json()) == 2


async def test_times(api: ApiSite) -> None:
    made = await api.create(timeout=100)
    assert await post(api, made, "timeout", timeout=50) == 204 and await left_s(api, made) <= 50
    assert await post(api, made, "refreshes", duration=20) == 204 and await left_s(api, made) > 40
    assert await post(api, made, "refreshes", duration=200) == 204 and await left_s(api, made) > 190
    assert await post(api, made, "refreshes") == 204
    assert await post(api, made, "refreshes", duration=3601) == 400
    assert await post(api, made, "timeout") == 400 and await post(api, made, "timeout", timeout=86401) == 400


async def test_forks_are_asked_for_and_told_one_by_one(site: Site) -> None:
    async with api_site(site, max_sandboxes=4) as api:
        parent = await api.create(timeout=1000, metadata={"a": "b"}, network={"allowPublicTraffic": False})
        site.engine.fail_launches = {2}
        answer = await api.http.post(f"/sandboxes/{parent['sandboxID']}/fork", json={"count": 3})
        assert answer.status_code == 201
        first, second, third = answer.json()
        failed = [child for child in (first, second, third) if "error" in child]
        assert len(failed) == 1 and failed[0]["error"]["code"] == 502 and failed[0]["error"]["message"]
        child = next(one["sandbox"] for one in (first, second, third) if "sandbox" in one)
        assert child["sandboxID"] != parent["sandboxID"]
        assert child["trafficAccessToken"] != parent["trafficAccessToken"]
        assert child["envdAccessToken"] != parent["envdAccessToken"]
        assert (await api.get(child["sandboxID"]))["metadata"] == {"a": "b"} and await left_s(api, child) > 900
        assert await post(api, parent, "fork", count=0) == 400 and await post(api, parent, "fork", count=21) == 400
        assert await post(api, parent, "fork", count=2) == 429  # 3 run, of 4
        short = await api.http.post(f"/sandboxes/{parent['sandboxID']}/fork", json={"timeout": 9})
        assert await left_s(api, short.json()[0]["sandbox"]) <= 9
        unknown = await api.http.post("/sandboxes/s" + "0" * 19 + "/fork", json={})
        assert "was not found" in refused(unknown, 404)


async def test_children_count_once_while_they_are_started(site: Site) -> None:
    async with api_site(site, max_sandboxes=4) as api:
        parent = await api.create()
        site.engine.boot_gate = asyncio.Event()
        forking = asyncio.create_task(post(api, parent, "fork", count=2))
        async with asyncio.timeout(60):
            while len(await api.server.node.list()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        fourth = asyncio.create_task(api.create())
        async with asyncio.timeout(60):
            while len(await api.server.node.list()) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused(await api.http.post("/v2/sandboxes", json={"templateID": "tiny"}), 429)
        site.engine.boot_gate.set()
        assert await forking == 201 and (await fourth)["sandboxID"]
        ours = {"Aenv-Version": VERSION}
        await api.http.delete(f"/sandboxes/{fourth.result()['sandboxID']}")
        by_command = await api.http.post(
            f"/aenv/v1/node/sandboxes/{parent['sandboxID']}/fork", json={"count": 1}, headers=ours
        )
        assert by_command.status_code == 201, by_command.text
        calls = [info.terms.request for info in await api.server.node.list()]
        assert len(calls) == len(set(calls)) == 4 and all(calls)


async def test_one_that_is_killed_while_it_is_started_is_no_unknown_template(api: ApiSite) -> None:
    api.site.engine.boot_gate = asyncio.Event()
    creating = asyncio.create_task(api.http.post("/v2/sandboxes", json={"templateID": "tiny"}))
    async with asyncio.timeout(60):
        while not (found := await api.server.node.list()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await api.server.node.kill(found[0].sandbox_id)
    assert "was killed while it was started" in refused(await creating, 409)
    assert await api.server.node.list() == []


async def test_a_resume_counts_against_the_limit(site: Site) -> None:
    async with api_site(site, max_sandboxes=1) as api:
        first = await api.create()
        assert await post(api, first, "pause") == 204
        second = await api.create()
        assert await post(api, first, "connect", "/v2") == 429
        assert (await api.http.delete(f"/sandboxes/{second['sandboxID']}")).status_code == 204
        assert await post(api, first, "connect", "/v2") == 201


async def test_connects_at_the_same_time_are_one_machine_of_the_limit(site: Site) -> None:
    async with api_site(site, max_sandboxes=1) as api:
        made = await api.create()
        assert await post(api, made, "pause") == 204
        statuses = await asyncio.gather(*(post(api, made, "connect", "/v2") for _ in range(6)))
        assert sorted(statuses) == [200] * 5 + [201]


async def test_connects_at_the_same_time_are_one_resume(api: ApiSite) -> None:
    made = await api.create()
    assert await post(api, made, "pause") == 204
    statuses = await asyncio.gather(*(post(api, made, "connect", "/v2") for _ in range(6)))
    assert sorted(statuses) == [200] * 5 + [201] and len(api.site.engine.machines) == 1


async def test_network_where_sandboxes_have_none_of_their_own(api: ApiSite) -> None:
    made = await api.create(allow_internet_access=True)  # the API's default: as far as this node can
    url = f"/sandboxes/{made['sandboxID']}/network"
    assert (await api.http.put(url, json={})).status_code == 204
    assert (await api.http.put(url, json={"allow_internet_access": False})).status_code == 204
    for part in ({"rules": {"a": []}}, {"allowPublicTraffic": False}, {"colour": 1}, {"denyOut": ["a b"]}):
        refused(await api.http.put(url, json=part), 400)
    assert "restricts nothing" in refused(await api.http.put(url, json={"allowOut": ["192.0.2.1"]}), 400)
    only = {"allowOut": ["192.0.2.1"], "denyOut": ["0.0.0.0/0"]}
    assert "no network of their own" in refused(await api.http.put(url, json=only), 501)
    assert await post(api, made, "pause") == 204
    assert "is paused" in refused(await api.http.put(url, json={}), 409)


async def test_a_caller_who_hangs_up_takes_the_launch_with_him(api: ApiSite) -> None:
    api.site.engine.boot_gate = asyncio.Event()
    call = asyncio.create_task(api.create())
    async with asyncio.timeout(10):
        while not await api.server.node.list():  # noqa: ASYNC110 - it is another process's state
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        while await api.server.node.list():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert api.site.clean()


async def test_a_dead_sandbox_is_gone_and_says_why(api: ApiSite) -> None:
    made = await api.create()
    (machine,) = api.site.engine.machines.values()
    machine.end("it had enough")
    async with asyncio.timeout(10):
        while (await api.server.node.get(str(made["sandboxID"]))).state is not State.DEAD:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "it had enough" in refused(await api.http.get(f"/sandboxes/{made['sandboxID']}"), 404)
    assert (await api.http.get("/v2/sandboxes")).json() == []


async def test_a_connect_while_another_resumes_it_waits_for_that(api: ApiSite) -> None:
    made = await api.create()
    assert await post(api, made, "pause") == 204
    api.site.engine.boot_gate = asyncio.Event()
    first = asyncio.create_task(post(api, made, "connect", "/v2"))
    async with asyncio.timeout(10):
        while (await api.server.node.get(str(made["sandboxID"]))).state is not State.RESUMING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    second = asyncio.create_task(post(api, made, "connect", "/v2"))
    await asyncio.wait([second], timeout=0.2)
    api.site.engine.boot_gate.set()
    assert (await first, await second) == (201, 200)
