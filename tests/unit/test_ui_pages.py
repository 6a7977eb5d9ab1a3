"""The dashboard's pages over a node with a pretended engine."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from aenv_run.api.templates.records import Line
from aenv_run.api.ui.session import COOKIE
from aenv_run.lifecycle import State
from tests.unit.api_site import ApiSite, api_site
from tests.unit.node_site import Site

OWN = {"Origin": "http://api"}
FORM = {**OWN, "Content-Type": "application/x-www-form-urlencoded"}


@asynccontextmanager
async def browser(site: Site) -> AsyncIterator[tuple[ApiSite, httpx.AsyncClient]]:
    """A server, and a browser that has logged in."""
    async with api_site(site) as api:
        answer = await api.bare.post(
            "/ui/login", content=f"key={api.server.keys.api_key}&next=/ui/catalog", headers=FORM
        )
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/catalog")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/ui" in cookie
        yield api, api.bare


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/sandboxes", "/ui/catalog", "/ui/builds", "/ui/nothing"])
async def test_nothing_is_shown_without_a_session(site: Site, path: str) -> None:
    async with api_site(site) as api:
        for key in ({}, {"X-API-Key": api.server.keys.api_key}, {"Cookie": f"{COOKIE}=1.2.3"}):
            answer = await api.bare.get(path, headers=key)
            assert answer.status_code == 303 and answer.headers["location"].startswith("/ui/login?next=")
        live = await api.bare.get(path, headers={"X-Fragment": "1"})
        assert live.status_code == 401


async def test_log_in(site: Site) -> None:
    async with api_site(site) as api:
        form = await api.bare.get("/ui/login", params={"next": "/ui/catalog"})
        assert form.status_code == 200 and 'value="/ui/catalog"' in form.text
        assert "default-src 'none'" in form.headers["content-security-policy"]
        wrong = await api.bare.post("/ui/login", content="key=x", headers=FORM)
        assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
        right = f"key={api.server.keys.api_key}"
        elsewhere = await api.bare.post("/ui/login", content=right, headers={**FORM, "Origin": "http://evil"})
        assert elsewhere.status_code == 403
        for outside in ("//evil", "http://evil", "/ui/%2f/evil", "/ui/\\evil", "/ui/a%0d%0ab", "/other"):
            answer = await api.bare.post("/ui/login", content=f"{right}&next={outside}", headers=FORM)
            assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sandboxes")
        too_large = await api.bare.post("/ui/login", content="key=" + "x" * 5000, headers=FORM)
        assert too_large.status_code == 413


async def test_log_out_ends_it(site: Site) -> None:
    async with browser(site) as (_, http):
        assert (await http.get("/ui/sandboxes")).status_code == 200
        assert (await http.post("/ui/logout", headers=OWN)).status_code == 303
        assert (await http.get("/ui/sandboxes")).status_code == 303


async def test_sandboxes_and_what_is_done_with_them(site: Site) -> None:
    async with browser(site) as (api, http):
        hostile = {"<script>alert(1)</script>": "\"'><img src=x>"}
        made = await api.create(metadata=hostile)
        page = await http.get("/ui/sandboxes")
        assert str(made["sandboxID"]) in page.text and "7 B of" in page.text
        assert "<script>alert" not in page.text and "<img" not in page.text
        part = await http.get("/ui/sandboxes", params={"fragment": "1"})
        assert str(made["sandboxID"]) in part.text and "<html" not in part.text
        place = f"/ui/sandboxes/{made['sandboxID']}"
        one = await http.get(place)
        assert "data-terminal" in one.text and "<script>alert" not in one.text
        assert (await http.post(f"{place}/pause")).status_code == 403, (
            "a form of another page has no origin of ours"
        )
        for action, state in (("pause", State.PAUSED), ("resume", State.RUNNING)):
            answer = await http.post(f"{place}/{action}", headers=OWN)
            assert (answer.status_code, answer.headers["location"]) == (303, place)
            assert (await api.server.node.get(str(made["sandboxID"]))).state is state
        forked = await http.post(f"{place}/fork", headers=OWN)
        assert (
            forked.headers["location"] != place and (await http.get(forked.headers["location"])).status_code == 200
        )
        assert (await http.post(f"{place}/kill", headers=OWN)).headers["location"] == "/ui/sandboxes"
        gone = await http.get(place)
        assert gone.status_code == 404 and "<h1>404</h1>" in gone.text
        assert (await http.post(f"{forked.headers['location']}/burn", headers=OWN)).status_code == 404
        await api.node.kill_live()


@pytest.mark.parametrize("id", ["x", "%2e%2e", "..%2f..%2fetc", "s" * 21, "<b>"])
async def test_an_id_that_is_none(site: Site, id: str) -> None:
    async with browser(site) as (_, http):
        answer = await http.get(f"/ui/sandboxes/{id}")
        assert answer.status_code == 404 and "<b>" not in answer.text


async def test_the_catalog_and_its_lineage(site: Site) -> None:
    async with browser(site) as (_, http):
        page = await http.get("/ui/catalog")
        assert '<a href="/ui/catalog/tiny">tiny</a>:1' in page.text
        drawn = await http.get("/ui/catalog/tiny")
        assert len(re.findall(r"<rect ", drawn.text)) == 1 and "tiny:1" in drawn.text
        assert (await http.get("/ui/catalog/nothing")).status_code == 404
        assert (await http.get("/ui/catalog/%3Cb%3E")).status_code in (400, 404)


async def test_builds_and_their_logs(site: Site) -> None:
    async with browser(site) as (api, http):
        assert "None yet" in (await http.get("/ui/builds")).text
        asked = await api.http.post("/v3/templates", json={"name": "shown"})
        id = asked.json()["buildID"]
        records = api.server.builds.records
        records.say(id, Line(at_s=0, message="<b>one</b>", step="0"))
        records.say(id, Line(at_s=1, message="two", level="error"))
        page = await http.get("/ui/builds")
        assert f'<a href="/ui/builds/{id}">' in page.text and ">waiting<" in page.text
        one = await http.get(f"/ui/builds/{id}", params={"fragment": "1"})
        assert "00:00:00  [0] &lt;b&gt;one&lt;/b&gt;" in one.text and "00:00:01  error: two" in one.text
        assert "X-Ended" not in one.headers
        records.change(id, status="error", reason="no room", reason_step="1")
        over = await http.get(f"/ui/builds/{id}", params={"fragment": "1"})
        assert over.headers["X-Ended"] == "1" and "no room (step 1)" in over.text
        for other in ("x", "..%2f..", "0" * 36):
            assert (await http.get(f"/ui/builds/{other}")).status_code == 404


async def test_the_parts_that_every_page_loads(site: Site) -> None:
    async with api_site(site) as api:
        for name, kind in (("ui.js", "javascript"), ("ui.css", "text/css")):
            answer = await api.bare.get(f"/ui/static/{name}")
            assert answer.status_code == 200 and kind in answer.headers["content-type"]
        assert (await api.bare.get("/ui/static/../app.py")).status_code in (303, 404)
        assert (await api.bare.get("/ui/static/%2e%2e/app.py")).status_code in (303, 404)
