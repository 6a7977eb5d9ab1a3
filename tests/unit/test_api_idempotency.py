"""The HTTP API: a create that is repeated with its idempotency key, also after the server was killed."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from aenv_run.api import idempotency
from aenv_run.api.idempotency import Outcome, Outcomes
from aenv_run.api.wire.life import PauseAsked
from aenv_run.node_wire import CreateRequest
from aenv_run.sandbox_record import Terms
from tests.unit.api_site import ApiSite, api_site, refused
from tests.unit.node_site import Site


@pytest.fixture
async def api(site: Site) -> AsyncIterator[ApiSite]:
    """A server without limits."""
    async with api_site(site) as made:
        yield made


async def create(api: ApiSite, key: str, **body: object) -> httpx.Response:
    return await api.http.post(
        "/v2/sandboxes", json={"templateID": "tiny", **body}, headers={"Idempotency-Key": key}
    )


def files(api: ApiSite) -> list[Path]:
    return list((api.site.home.api / "idempotency").iterdir())


async def test_a_repeat_gets_the_same_answer_and_no_other_sandbox(api: ApiSite) -> None:
    first = await create(api, "k-1", metadata={"a": "b"})
    again = await create(api, "k-1", metadata={"a": "b"})
    assert first.status_code == again.status_code == 201 and first.json() == again.json()
    assert len(api.site.engine.machines) == 1
    (path,) = files(api)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "k-1" not in path.name  # it holds a token
    other = await create(api, "k-1", metadata={"a": "c"})
    assert "another body" in refused(other, 422) and other.json()["error_code"] == "idempotency_request_mismatch"
    assert (await create(api, "k-2", metadata={"a": "b"})).json() != first.json()
    for key in ("", "K", "a b", "x" * 256):
        refused(await create(api, key), 400)


async def test_both_generations_have_it_and_keep_apart(api: ApiSite) -> None:
    async def ask(path: str, content: str) -> httpx.Response:
        return await api.http.post(path, content=content, headers={"Idempotency-Key": "k"})

    one = '{"templateID": "tiny", "metadata": {"a": "1", "b": "2"}}'
    first = await ask("/sandboxes", one)
    again = await ask("/sandboxes", '{"metadata": {"b": "2", "a": "1"}, "templateID": "tiny"}')
    assert first.status_code == again.status_code == 201 and first.json() == again.json()
    assert again.headers["x-agentenv-sandbox-id"] == first.json()["sandboxID"]
    assert "another body" in refused(await ask("/v2/sandboxes", one), 422)  # it has other defaults
    assert "Idempotency-Key" in refused(await ask("/sandboxes-cold", '{"image": "a"}'), 400)
    assert len(api.site.engine.machines) == 1


async def test_one_that_is_being_answered_is_not_begun_again(api: ApiSite) -> None:
    api.site.engine.boot_gate = asyncio.Event()
    first = asyncio.create_task(create(api, "k"))
    async with asyncio.timeout(10):
        while not await api.server.node.list():  # noqa: ASYNC110 - it is another process's state
            await asyncio.sleep(0.01)
    second = await create(api, "k")
    assert "still being answered" in refused(second, 409)
    assert second.json()["error_code"] == "idempotency_in_progress" and second.headers["retry-after"]
    api.site.engine.boot_gate.set()
    assert (await first).json() == (await create(api, "k")).json()


async def test_a_call_that_failed_may_be_repeated(api: ApiSite) -> None:
    api.site.engine.fail_launches = {0}
    assert "did not boot" in refused(await create(api, "k"), 502) and files(api) == []
    assert (await create(api, "k")).status_code == 201


async def test_after_a_server_was_killed_the_node_knows_what_was_done(api: ApiSite) -> None:
    body = {"templateID": "tiny"}
    assert (await create(api, "done")).status_code == 201
    (path,) = files(api)
    outcome = Outcome.model_validate_json(path.read_bytes())
    path.write_text(outcome.model_copy(update={"reply": None}).model_dump_json())  # killed before it was written
    found = await create(api, "done")
    assert len(await api.server.node.list()) == 1 and found.json()["envdAccessToken"]
    assert Outcome.model_validate_json(path.read_bytes()).reply is not None
    # killed before the node had begun: it is done now
    path.write_text(outcome.model_copy(update={"reply": None, "call": "nobody"}).model_dump_json())
    assert (await create(api, "done")).json()["sandboxID"] != found.json()["sandboxID"]
    # killed while the node was at it: the node is taking it back, and says so
    api.site.engine.boot_gate = asyncio.Event()
    terms = Terms(request=Outcome.model_validate_json(path.read_bytes()).call)
    for info in await api.server.node.list():
        await api.server.node.kill(info.sandbox_id)
    path.write_text(outcome.model_copy(update={"reply": None, "call": terms.request}).model_dump_json())
    making = asyncio.create_task(api.server.node.create(CreateRequest(snapshot="tiny", terms=terms)))
    async with asyncio.timeout(10):
        while not await api.server.node.list():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "still being answered" in refused(await create(api, "done"), 409)
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)
    async with asyncio.timeout(10):
        while await api.server.node.list():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    api.site.engine.boot_gate.set()
    assert (await create(api, "done")).status_code == 201
    path.write_text("damaged")
    assert (
        await api.http.post("/v2/sandboxes", json=body, headers={"Idempotency-Key": "done"})
    ).status_code == 201


async def test_outcomes_are_bounded(tmp_path: Path) -> None:
    done: list[str] = []

    async def work(call: str) -> str:
        done.append(call)
        return f"answer {len(done)}"

    async def find(call: str) -> str | None:
        return None

    outcomes = Outcomes(tmp_path / "outcomes")
    body = PauseAsked(memory=True)
    assert await outcomes.once("k", body, work, find=find) == "answer 1"
    assert await Outcomes(tmp_path / "outcomes").once("k", body, work, find=find) == "answer 1"
    (path,) = (tmp_path / "outcomes").iterdir()
    old = Outcome.model_validate_json(path.read_bytes()).at_s - 2 * idempotency.MAX_AGE_S
    path.write_text(
        Outcome.model_validate_json(path.read_bytes()).model_copy(update={"at_s": old}).model_dump_json()
    )
    assert await outcomes.once("k", body, work, find=find) == "answer 2"
    os.utime(path, (1, 1))
    fresh = Outcomes(tmp_path / "outcomes")
    assert await fresh.once("other", body, work, find=find) == "answer 3"
    assert not path.exists() and len(list((tmp_path / "outcomes").iterdir())) == 1
