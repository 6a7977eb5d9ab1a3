"""Sandboxes with a network of their own, on real machines. Needs root; the node runs on a host of the test's."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aenv_run import AsyncSandbox
from aenv_run.errors import NotFound, SandboxDead, Unsupported
from aenv_run.node_client import NodeClient
from aenv_run.paths import Home
from aenv_run.sandbox_network import NetworkSettings
from tests.contracts.machines import need_runsc
from tests.contracts.network_world import (
    HOST_PUBLIC,
    METADATA,
    NAME_SERVER,
    OTHER_WEB,
    PRIVATE_WEB,
    SERVICE_PORT,
    WEB,
    World,
    host_state,
    until,
    world,
)
from tests.e2e.conftest import ROOT, environment, node_home
from tests.e2e.test_build import make_base
from tests.e2e.tiny import make_tiny

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
BOTH = ("qemu", "gvisor")
SERVE = "mkdir -p /srv/www; echo {text} >/srv/www/index.html; busybox httpd -p {port} -h /srv/www"


@dataclass
class Site:
    """A home whose node runs on a host of its own, and that host's internet."""

    home: Home
    world: World
    node: NodeClient

    async def start(self, snapshot: str = "tiny", **settings: object) -> AsyncSandbox:
        return await AsyncSandbox.create(snapshot, home=self.home, **settings)  # type: ignore[arg-type]

    async def kill_node(self) -> None:
        health = await self.node.health()
        assert health is not None
        os.kill(health.pid, signal.SIGKILL)


@asynccontextmanager
async def site_of(home: Home) -> AsyncIterator[Site]:
    """With the snapshots of ``home``. At the end nothing of it is left on its host."""
    own = Home(Path(tempfile.mkdtemp(prefix="aenv-net-", dir=home.root.parent)))
    shutil.copytree(home.repository, own.repository, copy_function=os.link)
    settings = NetworkSettings(
        low_water=1, high_water=2, nameservers=(NAME_SERVER,), run_directory=own.root / "run"
    )
    own.network.mkdir()
    (own.network / "config.json").write_text(settings.model_dump_json())
    async with world(own.root) as made:
        while "NO-CARRIER" in host_state(own.root)["links"]:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.02)  # its links are coming up
        before, node = host_state(own.root), NodeClient(own)
        try:
            yield Site(own, made, node)
        finally:
            for info in await node.list():
                await node.kill(info.sandbox_id)
            await node.shutdown(kill=True)
        for _ in range(50):
            if (after := host_state(own.root)) == before:
                break
            await asyncio.sleep(0.1)
        assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}
        assert not list((own.network / "slots").glob("*"))
    shutil.rmtree(own.root)


async def out(sandbox: AsyncSandbox, command: str) -> str:
    return (await sandbox.commands.run(command, timeout=60)).stdout.strip()


async def reaches(sandbox: AsyncSandbox, address: str, port: int = 80) -> bool:
    said = await out(sandbox, f"busybox nc -w 3 {address} {port} </dev/null | busybox head -n 1")
    return said.count(".") == 3


async def fetch(host: str, port: int | None = None) -> str:
    """An HTTP/1.0 request to a host's port, or to a unix socket."""
    opening = asyncio.open_unix_connection(host) if port is None else asyncio.open_connection(host, port)
    reader, writer = await asyncio.wait_for(opening, 5)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    text = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return text.decode().rpartition("\n\n")[2].rpartition("\r\n\r\n")[2].strip()


async def test_a_sandbox_reaches_the_internet_and_no_neighbour(home: Home) -> None:
    async with site_of(home) as site:
        one, two = await site.start(), await site.start(internet=False)
        info = await two.get_info()
        assert info.host_address and not info.network.internet and (await one.get_info()).network.internet
        await two.commands.run(SERVE.format(text="two", port=80))
        assert await fetch(*_split(await two.get_host(80))) == "two"  # the host does
        assert await reaches(one, WEB) and "198.51.100.80" in await out(
            one, "busybox nslookup -type=a web.example.org"
        )
        assert not await reaches(two, WEB)
        for address, port in (
            (info.host_address, 80),
            (HOST_PUBLIC, SERVICE_PORT),
            ("10.0.2.2", SERVICE_PORT),
            (METADATA, 80),
            (PRIVATE_WEB, 80),
        ):
            assert not await reaches(one, address, port), address


@pytest.fixture
def both_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home with a snapshot of each driver, named as it."""
    need_runsc()
    with node_home(tmp_path_factory.getbasetemp()) as found:
        for driver in BOTH:
            (found.root / driver).mkdir()
            asyncio.run(make_tiny(found, found.root / driver, driver=driver, name=driver))
        yield found


async def test_engines_of_both_kinds_share_a_home_and_do_not_reach_each_other(both_home: Home) -> None:
    async with site_of(both_home) as site:
        both = {driver: await site.start(driver) for driver in BOTH}
        hosts = {}
        for driver, sandbox in both.items():
            info = await sandbox.get_info()
            assert info.driver == driver and info.host_address
            hosts[driver] = info.host_address
            await sandbox.commands.run(SERVE.format(text=driver, port=80))
        for driver, other in (BOTH, BOTH[::-1]):
            assert await fetch(*_split(await both[driver].get_host(80))) == driver
            assert await reaches(both[driver], WEB)
            assert not await reaches(both[driver], hosts[other])
        for sandbox in both.values():
            await sandbox.pause()
        for sandbox in both.values():
            await sandbox.resume()
            assert await reaches(sandbox, WEB)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def test_rules_change_at_once_and_survive_pause_resume_and_fork(home: Home) -> None:
    async with site_of(home) as site:
        one = await site.start(allow=["web.example.org"])
        assert "198.51.100.80" in await out(one, "busybox nslookup -type=a web.example.org")
        assert await reaches(one, WEB) and not await reaches(one, OTHER_WEB)
        policy = (await one.get_info()).network
        (child,) = await one.fork()
        assert isinstance(child, AsyncSandbox)
        await one.pause()
        assert (await one.get_info()).host_address is None
        await one.resume()
        for sandbox in (one, child):  # they know the address from before, and do not ask again
            assert await reaches(sandbox, WEB) and not await reaches(sandbox, OTHER_WEB)
            assert (await sandbox.get_info()).network == policy
        await one.set_network(allow=[OTHER_WEB])
        assert await reaches(one, OTHER_WEB) and not await reaches(one, WEB)
        assert await reaches(child, WEB), "a child's rules are its own"
        await one.set_network(internet=True, allow=[], deny=["198.51.100.80/32"])
        assert await reaches(one, OTHER_WEB) and not await reaches(one, WEB)
        await one.set_network(internet=False, deny=[])
        assert not await reaches(one, OTHER_WEB)
        await one.pause()
        await one.set_network(internet=True)
        await one.resume()
        assert await reaches(one, OTHER_WEB)


async def test_published_and_forwarded_ports(home: Home) -> None:
    async with site_of(home) as site:
        path = site.home.root / "app.sock"
        one = await site.start(publish={str(path): 8000})
        await one.commands.run(SERVE.format(text="served", port=8000))
        assert await fetch(str(path)) == "served" and path.stat().st_mode & 0o777 == 0o600
        forward = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aenv_run.cli", "port-forward", one.sandbox_id, "18000:8000"),
            cwd=ROOT,
            env=environment(site.home),
            stderr=asyncio.subprocess.PIPE,
        )
        assert forward.stderr is not None
        assert b"18000" in await asyncio.wait_for(forward.stderr.readline(), 30)
        assert await fetch("127.0.0.1", 18000) == "served"
        forward.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(forward.wait(), 10) == 130
        await site.kill_node()
        assert (await one.get_info()).published[0].port == 8000  # a new node
        assert await fetch(str(path)) == "served"
        await one.pause()
        assert not path.exists()
        await one.resume()
        assert await fetch(str(path)) == "served"
        await one.kill()
        assert not path.exists()


async def test_a_killed_node_leaves_no_namespace_link_or_rule(home: Home) -> None:
    async with site_of(home) as site:
        one, two, gone = await site.start(deny=[OTHER_WEB]), await site.start(), await site.start()
        await two.pause()
        await site.kill_node()
        engine = next(
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and _works_in(entry, site.home.sandboxes / gone.sandbox_id / "machine")
        )
        os.kill(engine, signal.SIGKILL)
        slots = len(list((site.home.network / "slots").glob("*.json")))
        assert slots > 2, "warm ones are left too"
        assert await out(one, "echo still here") == "still here"
        infos = {info.sandbox_id: info for info in await site.node.list()}  # a new node
        assert infos[(await one.get_info()).sandbox_id].host_address
        assert await reaches(one, WEB) and not await reaches(one, OTHER_WEB)
        with pytest.raises(SandboxDead):
            await gone.commands.run("true")
        await two.resume()
        assert await reaches(two, OTHER_WEB)


def _works_in(entry: Path, directory: Path) -> bool:
    try:
        return (entry / "cwd").readlink() == directory
    except OSError:
        return False


async def test_without_a_network_of_its_own_there_is_no_way_out(home: Home, tmp_path: Path) -> None:
    started_s = time.monotonic()
    for asked in ({"internet": True}, {"allow": ["example.org"]}, {"publish": {str(tmp_path / "s"): 80}}):
        with pytest.raises(Unsupported, match="switched off"):
            await AsyncSandbox.create("tiny", home=home, **asked)  # type: ignore[arg-type]
    assert time.monotonic() - started_s < 10
    async with await AsyncSandbox.create("tiny", home=home) as one:
        assert not (await one.get_info()).network.internet
        with pytest.raises(Unsupported):
            await one.get_host(80)
        with pytest.raises(Unsupported):
            await one.set_network(internet=True)
    with pytest.raises(NotFound):
        await one.get_info()


RECIPE = f"""
version: 1
name: fetched
base: {{archive: root.tar}}
machine: {{memory: 256MiB, disk: 64MiB, internet: true}}
steps:
  - {{id: fetch, run: 'busybox nc -w 5 {WEB} 80 </dev/null | busybox head -n 1 >/srv/a; test -s /srv/a'}}
  - {{id: closed, run: '! busybox nc -w 3 {HOST_PUBLIC} {SERVICE_PORT} </dev/null | busybox grep -F .; WAIT'}}
"""


async def test_a_build_has_slots_of_its_own_and_a_killed_one_leaves_none_for_long(home: Home) -> None:
    async with site_of(home) as site:
        make_base(site.home.root / "root.tar")

        async def build(last: str) -> asyncio.subprocess.Process:
            recipe = site.home.root / "recipe.yaml"
            recipe.write_text(RECIPE.replace("WAIT", last))
            argv = (sys.executable, "-m", "aenv_build.cli", str(recipe), "--home", str(site.home.root))
            return await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)

        killed = await build("sleep 600")
        temporary = site.home.network / "temporary"

        async def has_a_slot() -> bool:
            assert killed.returncode is None
            return bool(list(temporary.glob("*/network/slots/*.json")))

        await until(has_a_slot, 60)
        one = await site.start()  # a node starts meanwhile, and takes nothing away
        assert await has_a_slot()
        killed.kill()
        await killed.communicate()
        whole = await build("true")
        _, said = await asyncio.wait_for(whole.communicate(), 120)
        assert whole.returncode == 0, said.decode()
        assert not list(temporary.glob("*")) and await reaches(one, WEB)
