"""The HTTP API: keys, errors, bounds; create, get, list, kill."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from aenv_run.api.admission import Admission
from aenv_run.api.keys import open_keys
from aenv_run.api.paging import place_of, token_of
from aenv_run.api.sandboxes.list import metadata_filter
from aenv_run.api.serve import TextLines
from aenv_run.api.settings import Settings
from aenv_run.errors import AenvError, InvalidInput, LimitReached
from aenv_run.paths import Home
from tests.unit.api_site import ApiSite, api_site, refused
from tests.unit.node_site import Site


@pytest.fixture
async def api(site: Site) -> AsyncIterator[ApiSite]:
    """A server without limits."""
    async with api_site(site) as made:
        yield made


async def test_a_key_exactly_once_or_401(api: ApiSite) -> None:
    key = api.server.keys.api_key
    assert "is missing" in refused(await api.bare.get("/v2/sandboxes"), 401)
    assert "is wrong" in refused(await api.bare.get("/v2/sandboxes", headers={"X-API-Key": key + "x"}), 401)
    twice = httpx.Headers([("X-API-Key", key), ("X-API-Key", key)])
    assert "more than once" in refused(await api.bare.get("/v2/sandboxes", headers=twice), 401)
    assert "is missing" in refused(await api.bare.post("/nowhere", content=b"{"), 401)
    assert (await api.bare.get("/health")).status_code == (await api.bare.head("/health")).status_code == 204
    text = (await api.bare.get("/metrics")).text
    assert "aenv_node_up 1.0" in text and 'route="unmatched"' in text
    assert (await api.bare.get("/openapi.json")).json()["info"]["title"] == "aenv"


async def test_every_error_has_one_form(api: ApiSite) -> None:
    assert refused(await api.http.get("/nowhere"), 404) == "route not found: GET /nowhere"
    wrong = await api.http.patch("/v2/sandboxes")
    assert "PATCH is not allowed" in refused(wrong, 405) and wrong.headers["allow"] == "GET, POST"
    post = api.http.post
    assert "templateID" in refused(await post("/v2/sandboxes", json={}), 400)
    assert "JSON" in refused(await post("/v2/sandboxes", content=b"{"), 400)
    twice = await post("/v2/sandboxes", content=b'{"templateID":"tiny","timeout":1,"timeout":2}')
    assert "'timeout' is there more than once" in refused(twice, 400)
    nothing = await post("/v2/sandboxes", content=b'{"templateID":"tiny","timeout":NaN}')
    assert "NaN is no number" in refused(nothing, 400)
    assert "colour: this query" in refused(await api.http.get("/v2/sandboxes?colour=red"), 400)
    assert "limit: this query" in refused(await api.http.get("/v2/sandboxes?limit=1&limit=2"), 400)
    assert (await api.http.get("/v2/sandboxes?state=running&state=paused")).status_code == 200
    assert "nothing can be called" in refused(await post("/v2/sandboxes", json={"templateID": "a" * 12}), 404)
    unknown = await post("/v2/sandboxes", json={"templateID": "tiny", "colour": "red"})
    assert refused(unknown, 400) == "colour: this field is not known, and would be ignored"
    for part in ({"mcp": {"a": 1}}, {"iam": {"tokens": {}}}, {"volumeMounts": [{"name": "v"}]}):
        assert "is not supported" in refused(await post("/v2/sandboxes", json={"templateID": "tiny", **part}), 400)
    network = {"templateID": "tiny", "network": {"httpsPorts": [443]}}
    assert "network.httpsPorts is not supported" in refused(await post("/v2/sandboxes", json=network), 400)
    both = {"templateID": "tiny", "autoPauseMemory": False, "autoResume": {"enabled": True}}
    assert "autoResume needs the memory" in refused(await post("/v2/sandboxes", json=both), 400)
    assert "template 'none'" in refused(await post("/v2/sandboxes", json={"templateID": "none"}), 404)
    assert "template 'none'" in refused(await post("/sandboxes", json={"templateID": "none"}), 400)
    assert "nothing can be called that" in refused(await post("/v2/sandboxes", json={"templateID": "../x"}), 404)
    for sandbox_id in ("x", "s" + "0" * 19, "%00", "s" * 300):
        assert "was not found" in refused(await api.http.get(f"/sandboxes/{sandbox_id}"), 404)
        assert "was not found" in refused(await api.http.delete(f"/sandboxes/{sandbox_id}"), 404)


async def test_a_body_is_bounded(site: Site) -> None:
    async with api_site(site, max_body_bytes=2000, body_s=0.2) as api:
        large = {"templateID": "tiny", "metadata": {"a": "x" * 3000}}
        assert "larger than 2000" in refused(await api.http.post("/v2/sandboxes", json=large), 413)

        async def pieces(count: int) -> AsyncIterator[bytes]:
            for _ in range(count):
                yield b" " * 1000

        assert "larger than 2000" in refused(await api.http.post("/v2/sandboxes", content=pieces(3)), 413)

        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(60)

        assert "did not come" in refused(await api.http.post("/v2/sandboxes", content=slow()), 408)


async def test_create_get_list_kill(api: ApiSite) -> None:
    made = await api.create(metadata={"who": "me"}, envVars={"B": "2"}, mcp=None, volumeMounts=[])
    assert made["templateID"] == made["alias"] == "tiny" and made["clientID"] == "" and made["envdVersion"]
    assert made["envdAccessToken"] and "trafficAccessToken" not in made
    found = await api.get(made["sandboxID"])
    assert found["state"] == "running" and found["metadata"] == {"who": "me"}
    assert (found["cpuCount"], found["memoryMB"], found["diskSizeMB"]) == (1, 512, 4096)
    assert found["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    assert found["envdAccessToken"] == made["envdAccessToken"] and found["allowInternetAccess"] is False
    (row,) = (await api.http.get("/v2/sandboxes")).json()
    assert (
        row["sandboxID"] == made["sandboxID"] and "envdAccessToken" not in row and row["endAt"] > row["startedAt"]
    )
    assert (await api.http.delete(f"/sandboxes/{made['sandboxID']}")).status_code == 204
    assert "was not found" in refused(await api.http.delete(f"/sandboxes/{made['sandboxID']}"), 404)
    assert (await api.http.get("/v2/sandboxes")).json() == [] and api.site.clean()


async def test_each_generation_keeps_its_defaults(api: ApiSite) -> None:
    v1 = await api.http.post("/sandboxes", json={"templateID": "tiny:latest"})
    assert v1.status_code == 201 and v1.headers["x-agentenv-sandbox-id"] == v1.json()["sandboxID"]
    assert "envdAccessToken" not in v1.json()
    first = await api.server.node.get(v1.json()["sandboxID"])
    assert (first.timeout_s, first.on_timeout, first.terms.secure) == (15, "pause", False)
    second = await api.server.node.get(str((await api.create())["sandboxID"]))
    assert (second.timeout_s, second.on_timeout, second.terms.secure) == (300, "kill", True)
    secure = await api.http.post("/sandboxes", json={"templateID": "tiny", "secure": True, "autoPause": False})
    assert secure.json()["envdAccessToken"]
    assert (await api.server.node.get(secure.json()["sandboxID"])).on_timeout == "kill"


async def test_a_name_that_the_settings_know(site: Site) -> None:
    async with api_site(site, templates={"code-interpreter-v1": "tiny:latest"}) as api:
        made = await api.create(templateID="code-interpreter-v1")
        assert made["templateID"] == "tiny" and made["alias"] == "code-interpreter-v1"
        answer = await api.http.post("/v2/sandboxes", json={"templateID": "other"})
        assert "template 'other' not found" in refused(answer, 404)


async def test_terms_are_kept_and_tokens_are_stable(api: ApiSite) -> None:
    network = {"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}"}
    made = await api.create(network=network, autoPause=True, autoResume={"enabled": True})
    info = await api.server.node.get(str(made["sandboxID"]))
    assert info.terms.auto_resume and not info.terms.public_ports and info.terms.mask_host == "localhost:${PORT}"
    assert made["trafficAccessToken"] == api.server.keys.traffic_token(info.sandbox_id)
    shown = (await api.get(made["sandboxID"]))["network"]
    assert isinstance(shown, dict) and shown["maskRequestHost"] == "localhost:${PORT}"
    assert shown["allowPublicTraffic"] is False


async def test_pages_by_time_and_id_in_both_orders(api: ApiSite) -> None:
    ids = [(await api.create(metadata={"n": str(n)}))["sandboxID"] for n in range(5)]

    async def pages(**query: object) -> list[str]:
        found: list[str] = []
        token = ""
        while True:
            parameters = {**query, "limit": 2, **({"nextToken": token} if token else {})}
            answer = await api.http.get("/v2/sandboxes", params=parameters)
            found += [row["sandboxID"] for row in answer.json()]
            if not (token := answer.headers.get("x-next-token", "")):
                return found

    assert await pages() == ids[::-1] and await pages(order="asc") == ids
    assert "x-next-token" not in (await api.http.get("/v2/sandboxes")).headers
    assert "nextToken" in refused(await api.http.get("/v2/sandboxes?nextToken=xyz"), 400)
    assert "limit" in refused(await api.http.get("/v2/sandboxes?limit=101"), 400)
    assert "state" in refused(await api.http.get("/v2/sandboxes?state=gone"), 400)
    (third,) = (await api.http.get("/v2/sandboxes", params={"metadata": "n=2"})).json()
    assert third["sandboxID"] == ids[2]
    assert (await api.http.get("/v2/sandboxes", params={"template": "other"})).json() == []
    assert len((await api.http.get("/v2/sandboxes", params={"template": "tiny"})).json()) == 5
    after = third["startedAt"]
    assert [
        row["sandboxID"] for row in (await api.http.get("/v2/sandboxes", params={"startedAfter": after})).json()
    ] == (ids[:2:-1])


async def test_no_more_than_the_limit_are_started(site: Site) -> None:
    async with api_site(site, max_sandboxes=20) as api:
        body = {"templateID": "tiny"}
        answers = await asyncio.gather(*(api.http.post("/v2/sandboxes", json=body) for _ in range(200)))
        made = [answer for answer in answers if answer.status_code == 201]
        assert len(made) == 20 == len(site.engine.machines)
        for answer in answers:
            if answer.status_code != 201:
                assert "at most 20" in refused(answer, 429) and int(answer.headers["retry-after"]) > 0
                assert answer.json()["error_code"] == "sandbox_capacity_unavailable"
        await api.http.delete(f"/sandboxes/{made[0].json()['sandboxID']}")
        assert (await api.http.post("/v2/sandboxes", json=body)).status_code == 201


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", True),
        ("timeout", "60"),
        ("autoPause", "no"),
        ("autoPause", 1),
        ("autoResume", {"enabled": "on"}),
    ],
)
async def test_a_value_of_another_type_is_refused(api: ApiSite, field: str, value: object) -> None:
    answer = await api.http.post("/v2/sandboxes", json={"templateID": "tiny", field: value})
    assert field in refused(answer, 400) and not api.site.engine.machines


async def test_a_full_server_says_so_without_asking_its_node(site: Site) -> None:
    async with AsyncExitStack() as starting:
        async with api_site(site) as api:
            admission = Admission(api.server.node, 2)
            for _ in range(2):
                await starting.enter_async_context(admission.admit())
        with pytest.raises(LimitReached, match="2 of at most 2"):
            await starting.enter_async_context(admission.admit())
        assert await api.server.node.health() is None  # else it would have been started to be asked


def test_metadata_is_decoded_three_times() -> None:
    assert metadata_filter("a=b&c=d") == {"a": "b", "c": "d"}
    assert metadata_filter("a%2520b=c%253Dd%2526%25C3%25A9") == {"a b": "c=d&é"}
    for wrong in ("a", "a=%FF", "a=%25FF"):
        with pytest.raises(InvalidInput, match="metadata"):
            metadata_filter(wrong)


def test_a_token_is_a_place() -> None:
    place = (1767225600.123456789, "s" + "0" * 19)
    assert place_of(token_of(place)) == (round(place[0], 9), place[1])
    for wrong in ("", "x", "====", "\xff", token_of((1.0, "a b")), "bnVsbA"):
        with pytest.raises(InvalidInput, match="nextToken"):
            place_of(wrong)


def test_secrets_are_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    monkeypatch.delenv("AENV_API_KEY", raising=False)
    made = open_keys(home)
    path = home.secrets / "api-key"
    assert made.generated == path and made.api_key.startswith("e2b_") and len(made.api_key) == 68
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(home.secrets.stat().st_mode) == 0o700
    again = open_keys(home)
    assert again.generated is None and again == made.__class__(made.api_key, made.token_seed)
    assert made.api_key not in repr(made)
    monkeypatch.setenv("AENV_API_KEY", "k" * 32)
    assert open_keys(home).api_key == "k" * 32 and open_keys(home).token_seed == made.token_seed
    monkeypatch.setenv("AENV_API_KEY", "short")
    with pytest.raises(InvalidInput, match="32 to 256"):
        open_keys(home)
    monkeypatch.delenv("AENV_API_KEY")
    path.write_text("damaged")
    with pytest.raises(AenvError, match="does not hold"):
        open_keys(home)


def test_settings_come_from_a_file_and_options(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('port = 9\nmax_sandboxes = 2\ndomains = ["Box.Example.org."]\n')
    read = Settings.read(path, port=10, host=None)
    assert (read.port, read.max_sandboxes, read.host, read.domain) == (10, 2, "127.0.0.1", "box.example.org")
    path.write_text("colour = 1")
    with pytest.raises(InvalidInput, match="setting colour"):
        Settings.read(path)
    with pytest.raises(InvalidInput, match=r"setting domains\.?.*not a domain"):
        Settings.read(domains=("a b",))
    with pytest.raises(InvalidInput, match="cannot be read"):
        Settings.read(tmp_path / "none.toml")


async def test_a_full_server_refuses_without_asking_the_node(site: Site) -> None:
    async with api_site(site, max_sandboxes=1) as api:
        admission = api.server.admission
        async with admission.admit(), admission._lock, asyncio.timeout(60):  # as if the node did not answer
            answer = await api.http.post("/v2/sandboxes", json={"templateID": "tiny"})
        assert "1 of at most 1" in refused(answer, 429)


def test_a_path_writes_no_lines_of_the_log() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "GET %s 404", ("/a\nforged \x1b[2J",), None)
    assert (
        TextLines("%(message)s").format(record)
        == "GET /a\N{REPLACEMENT CHARACTER}forged \N{REPLACEMENT CHARACTER}[2J 404"
    )
