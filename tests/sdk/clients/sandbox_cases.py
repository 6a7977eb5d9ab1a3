"""Sandboxes: made, found, described, reached."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import httpx
from cases import Site, case, got, has, raises, until
from e2b import AuthenticationException, NotFoundException, SandboxException, SandboxQuery, SandboxState

METADATA = {"user name": "zoë = 1&2", "path/ü": "a+b %20", "plain": "yes"}


@case("Sandbox.create")
async def create(site: Site) -> None:
    site.sandbox = await got(
        site.Sandbox.create(
            timeout=600,
            metadata=METADATA | {"run": site.unique},
            envs={"MINE": 'it\'s "so"'},
            network={"allow_public_traffic": False},
            lifecycle={"on_timeout": "pause", "auto_resume": True},
        )
    )
    assert site.sandbox.sandbox_id and site.sandbox.traffic_access_token


@case("Sandbox.create of no template")
async def create_unknown(site: Site) -> None:
    error = await raises(SandboxException, lambda: site.Sandbox.create("no-such-template"))
    # 404 from POST /v2/sandboxes, 400 from POST /sandboxes, which older versions call
    assert str(error)[:3] in ("404", "400") and "no-such-template" in str(error), error


@case("Sandbox.create with a wrong key")
async def create_without_key(site: Site) -> None:
    await raises(AuthenticationException, lambda: site.Sandbox.create(api_key="e2b_" + "0" * 64))


@case("sandbox.get_info")
async def get_info(site: Site) -> None:
    info = await got(site.sandbox.get_info())
    assert info.sandbox_id == site.sandbox.sandbox_id and info.state == SandboxState.RUNNING
    assert info.metadata == METADATA | {"run": site.unique}, info.metadata
    assert info.cpu_count == 1 and info.memory_mb == 512
    now = datetime.now(UTC)
    assert now - timedelta(minutes=5) < info.started_at < now + timedelta(minutes=1)
    assert now + timedelta(minutes=5) < info.end_at < now + timedelta(minutes=11)
    other = await got(site.Sandbox.get_info(site.sandbox.sandbox_id))
    assert other.sandbox_id == info.sandbox_id
    await raises(NotFoundException, lambda: site.Sandbox.get_info("i" + "0" * 19))


@case("Sandbox.connect")
async def connect(site: Site) -> None:
    other = await got(site.Sandbox.connect(site.sandbox.sandbox_id))
    assert (await got(other.commands.run("echo $MINE"))).stdout == 'it\'s "so"\n'
    assert other.traffic_access_token == site.sandbox.traffic_access_token
    await raises(NotFoundException, lambda: site.Sandbox.connect("i" + "0" * 19))


@case("sandbox.connect")
async def connect_instance(site: Site) -> None:
    again = await got(site.sandbox.connect(timeout=900))
    assert again.sandbox_id == site.sandbox.sandbox_id


async def listed(site: Site, **options: object) -> list[str]:
    """Ids, over all pages."""
    pages = site.Sandbox.list(**options)
    found = []
    while pages.has_next:
        found += [info.sandbox_id for info in await got(pages.next_items())]
    return found


@case("Sandbox.list")
async def list_all(site: Site) -> None:
    assert site.sandbox.sandbox_id in await listed(site)


@case("Sandbox.list by metadata")
async def list_by_metadata(site: Site) -> None:
    mine = METADATA | {"run": site.unique}
    assert await listed(site, query=SandboxQuery(metadata=mine)) == [site.sandbox.sandbox_id]
    assert await listed(site, query=SandboxQuery(metadata=mine | {"plain": "no"})) == []


@case("Sandbox.list by state")
async def list_by_state(site: Site) -> None:
    mine = {"run": site.unique}
    running = SandboxQuery(metadata=mine, state=[SandboxState.RUNNING])
    assert await listed(site, query=running) == [site.sandbox.sandbox_id]
    assert await listed(site, query=SandboxQuery(metadata=mine, state=[SandboxState.PAUSED])) == []


@case("Sandbox.list in pages")
async def list_in_pages(site: Site) -> None:
    pages = site.Sandbox.list(limit=1, query=SandboxQuery(metadata={"run": site.unique}))
    assert len(await got(pages.next_items())) == 1
    every = await listed(site, limit=1)
    assert site.sandbox.sandbox_id in every and len(set(every)) == len(every)


@case("sandbox.set_timeout")
async def set_timeout(site: Site) -> None:
    await got(site.sandbox.set_timeout(1200))
    info = await got(site.sandbox.get_info())
    assert info.end_at > datetime.now(UTC) + timedelta(minutes=15)
    await got(site.sandbox.set_timeout(600))
    info = await got(site.sandbox.get_info())
    assert info.end_at < datetime.now(UTC) + timedelta(minutes=11)
    await raises(NotFoundException, lambda: site.Sandbox.set_timeout("i" + "0" * 19, 60))


@case("sandbox.is_running")
async def is_running(site: Site) -> None:
    assert await got(site.sandbox.is_running()) is True


@case("sandbox.get_metrics")
async def get_metrics(site: Site) -> None:
    (last, *_) = await until(site.sandbox.get_metrics)
    assert last.cpu_count == 1 and 0 < last.mem_used <= last.mem_total and 0 < last.disk_used <= last.disk_total


@case("sandbox.update_network")
async def update_network(site: Site) -> None:
    has(site.sandbox, "update_network")
    await got(site.sandbox.update_network({"allow_internet_access": False}))
    info = await got(site.sandbox.get_info())
    assert info.allow_internet_access is False
    await got(site.sandbox.update_network({}))


@case("sandbox.get_host")
async def get_host(site: Site) -> None:
    serve = "mkdir -p /tmp/www && echo served >/tmp/www/page && exec python3 -m http.server 8080 -d /tmp/www"
    await got(site.sandbox.commands.run(serve, background=True, timeout=0))
    host = site.sandbox.get_host(8080)
    assert host.startswith(f"8080-{site.sandbox.sandbox_id}.")
    headers = {"e2b-traffic-access-token": site.sandbox.traffic_access_token}
    async with httpx.AsyncClient() as http:
        answer = await until_up(http, f"https://{host}/page", headers)
        assert (answer.status_code, answer.text) == (200, "served\n"), answer.text
        assert (await http.get(f"https://{host}/page")).status_code == 403
        closed = await http.get(f"https://{site.sandbox.get_host(8081)}/", headers=headers)
        assert closed.status_code == 502 and "not open" in closed.json()["message"]


async def until_up(http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> httpx.Response:
    """The first answer that is not of the proxy itself."""

    async def look() -> httpx.Response | None:
        answer = await http.get(url, headers=headers)
        return None if answer.status_code == 502 else answer

    return await until(look)


@case("sandbox.upload_url, download_url")
async def file_urls(site: Site) -> None:
    path = "/home/user/by url.txt"
    async with httpx.AsyncClient() as http:
        url = site.sandbox.upload_url(path, use_signature_expiration=60)
        sent = await http.post(url, files={"file": ("by url.txt", "signed")})
        assert sent.status_code == 200, sent.text
        assert await got(site.sandbox.files.read(path)) == "signed"
        url = site.sandbox.download_url(path, use_signature_expiration=60)
        assert (await http.get(url)).text == "signed"
        assert (await http.get(site.sandbox.download_url(path))).text == "signed"
        assert (await http.get(url.replace("by%20url", "other").replace("by+url", "other"))).status_code == 401
        late = site.sandbox.download_url(path, use_signature_expiration=-60)
        assert (await http.get(late)).status_code == 401


@case("sandbox_url: one URL for all, by headers")
async def shared_url(site: Site) -> None:
    has(site.sandbox, "envd_direct_url")  # such versions say in headers whose a request is
    other = await got(site.Sandbox.connect(site.sandbox.sandbox_id, sandbox_url=os.environ["E2B_API_URL"]))
    assert (await got(other.commands.run("echo $MINE"))).stdout == 'it\'s "so"\n'
    await got(other.files.write("/tmp/shared", "text"))
    assert await got(other.files.read("/tmp/shared")) == "text"
    assert await got(other.is_running()) is True
