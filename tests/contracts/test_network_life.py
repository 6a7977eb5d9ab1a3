"""The pool, what a killed node leaves, and that nothing stays behind. Needs root; touches nothing real."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aenv_run.errors import Conflict, LimitReached, NotFound
from aenv_run.network import Network, NetworkConfig, NetworkPolicy, SlotId
from aenv_run.network.addressing import UPLINK_PREFIX
from aenv_run.network.requirements import requirements
from aenv_run.paths import Home
from tests.contracts.network_world import (
    HOST_PUBLIC,
    NAME_SERVER,
    OTHER_WEB,
    PRIVATE_WEB,
    WEB,
    Guest,
    host_state,
    serve_tcp,
    sh,
    tap_guest,
    until,
    veth_guest,
    world,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

COLD = NetworkConfig(low_water=0, high_water=0, nameservers=(NAME_SERVER,))
WARM = NetworkConfig(low_water=2, high_water=3, nameservers=(NAME_SERVER,))

NODE = """
import asyncio, sys
from pathlib import Path
from aenv_run.network import Network, NetworkConfig, NetworkPolicy
from aenv_run.paths import Home

async def main(home):
    config = NetworkConfig(low_water=1, high_water=1, nameservers=("198.51.100.53",))
    net = Network(Home(home), config, kinds=("tap", "veth"), run_directory=home / "run")
    await net.start()
    one, two = await net.acquire("veth"), await net.acquire("tap")
    await net.apply(one.slot_id, NetworkPolicy(allow=("web.example.org", "10.77.0.0/24")))
    await net.apply(two.slot_id, NetworkPolicy(allow=("10.77.0.0/24",)))
    while sum((await net.status()).warm.values()) < 2:
        await asyncio.sleep(0.05)
    print(one.slot_id, two.slot_id, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


def made(home: Path, config: NetworkConfig = COLD, run: Path | None = None) -> Network:
    return Network(Home(home), config, kinds=("tap", "veth"), run_directory=run or home / "run")


async def settled(before: dict[str, str], *homes: Path) -> dict[str, tuple[str, str]]:
    """What differs from ``before``, once the kernel has had its time."""
    for _ in range(50):
        after = host_state(*homes)
        if after == before:
            return {}
        await asyncio.sleep(0.1)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


async def is_warm(net: Network) -> bool:
    return (await net.status()).warm == {"tap": 3, "veth": 3}


async def is_quiet(net: Network) -> bool:
    return not (await net.status()).releasing


async def test_nothing_is_left(tmp_path: Path) -> None:
    async with world(tmp_path):
        before = host_state(tmp_path)
        net = made(tmp_path, WARM)
        await net.start()
        leases = [await net.acquire("veth"), await net.acquire("tap")]
        await net.apply(leases[0].slot_id, NetworkPolicy(allow=("10.77.0.0/24", "web.example.org")))
        assert await veth_guest(leases[0].slot).reaches_soon(PRIVATE_WEB)
        async with tap_guest(leases[1].slot) as guest:
            assert await guest.reaches_soon(WEB)
        during = host_state(tmp_path)
        assert during["ip_forward"] == before["ip_forward"] == "0\n"
        for lease in leases:
            await net.release(lease.slot_id)
            await net.release(lease.slot_id)  # idempotent
        await net.close()
        assert await settled(before, tmp_path) == {}
        assert not list((tmp_path / "network" / "slots").iterdir())
        assert not (tmp_path / "run").exists()


async def test_the_host_does_not_become_a_router(tmp_path: Path) -> None:
    """Its interfaces forward for sandboxes only: what comes from outside for elsewhere is still dropped."""
    async with world(tmp_path) as out:
        net = made(tmp_path)
        await net.start()
        # Behind the host's second interface: a machine that somebody on the first wants to reach through the host.
        inner = Path(f"/run/netns/{out.name}-lan")
        sh(f"ip netns add {inner.name}; ip link set lan netns {inner.name}", out.name)
        sh("ip route add 192.168.77.0/24 via 203.0.113.1", out.name)
        try:
            sh("ip link set lo up; ip addr add 192.168.77.9/24 dev lan; ip link set lan up", inner.name)
            sh("ip route add default via 192.168.77.1", inner.name)
            server = await serve_tcp(inner, "0.0.0.0", 80)
            assert await Guest(out.path).tcp("192.168.77.9") == "timeout"
            sh("nft flush set inet aenv guarded")  # it was this that held it
            assert await Guest(out.path).tcp("192.168.77.9") == "203.0.113.254"
            server.close()
        finally:
            sh(f"ip netns del {inner.name}")
            await net.close()


async def test_killed_node_is_followed_by_another(tmp_path: Path) -> None:
    async with world(tmp_path):
        before = host_state(tmp_path)
        node = await asyncio.create_subprocess_exec(
            sys.executable, "-c", NODE, str(tmp_path), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert node.stdout is not None
            async with asyncio.timeout(60):
                one, two = map(SlotId, (await node.stdout.readline()).decode().split())
            guest = Guest(one.guest)
            assert await guest.lookup("web.example.org") == WEB
        finally:
            node.kill()
            await node.wait()
        routers = host_state(tmp_path)["namespaces"].count("aenv-r-")  # two in use; it may have been making more
        # The rules hold without a node; names have to wait for the next.
        assert await guest.reaches_soon(WEB)
        assert not await guest.reaches(OTHER_WEB)
        net = made(tmp_path)
        found = await net.start({one, SlotId("00000000-0001")})
        assert found.adopted == {one}
        assert two in found.removed and len(found.removed) >= routers - 1 >= 3
        assert found.lost == {SlotId("00000000-0001")}
        assert await guest.reaches_soon(WEB)  # by an answer of the killed node
        assert await guest.reaches_soon(PRIVATE_WEB)
        assert not await guest.reaches(OTHER_WEB)
        assert await guest.lookup("web.example.org") == WEB
        assert await guest.lookup("other.example.net") == "NXDOMAIN"
        assert sh("nft -j list set inet aenv opened").count("10.77.0.0") == 1  # the other's is gone
        assert net.policy(one).allow == ("web.example.org", "10.77.0.0/24")
        assert (await net.acquire("tap")).slot_id != one
        for slot_id in (await net.status()).leased:
            await net.release(slot_id)
        await net.close()
        assert await settled(before, tmp_path) == {}


async def test_half_made_slots_are_removed(tmp_path: Path) -> None:
    """Killed between any two commands: a namespace alone, a link without its mark, a record alone."""
    async with world(tmp_path):
        before = host_state(tmp_path)
        net = made(tmp_path)
        await net.start()
        slot_id = (await net.acquire("veth")).slot_id
        await net.close()  # it stays: its sandbox may live on
        tag = slot_id.tag
        sh(f"ip netns add aenv-r-{tag}-0100")
        sh(f"ip netns add aenv-g-{tag}-0101")
        sh(
            f"ip netns add aenv-r-{tag}-0102;"
            f"ip link add aenv-u-0102 type veth peer name uplink netns aenv-r-{tag}-0102"
        )
        (tmp_path / "network" / "slots" / f"{tag}-0103.json").write_text("{")
        again = made(tmp_path)
        found = await again.start()
        assert len(found.removed) == 5
        await again.close()
        assert await settled(before, tmp_path) == {}


async def test_slots_in_use_outlive_close(tmp_path: Path) -> None:
    async with world(tmp_path):
        before = host_state(tmp_path)
        net = made(tmp_path)
        await net.start()
        lease = await net.acquire("veth")
        await net.close()
        assert await veth_guest(lease.slot).reaches_soon(WEB)
        again = made(tmp_path)
        assert (await again.start({lease.slot_id})).adopted == {lease.slot_id}
        assert again.lease(lease.slot_id) == lease
        await again.release(lease.slot_id)
        await again.close()
        assert await settled(before, tmp_path) == {}


async def test_two_homes_on_one_host(tmp_path: Path) -> None:
    async with world(tmp_path / "one", tmp_path / "two"):
        homes = (tmp_path / "one", tmp_path / "two")
        before = host_state(*homes)
        run = tmp_path / "run"
        one, two = (made(home, COLD.model_copy(update={"host_poll_s": 0.3}), run) for home in homes)
        await asyncio.gather(one.start(), two.start())
        leases = await asyncio.gather(*(net.acquire("veth") for net in (one, two, one, two)))
        assert len({lease.slot.host_address for lease in leases}) == 4
        assert all(await asyncio.gather(*(veth_guest(lease.slot).reaches_soon(WEB) for lease in leases)))
        assert not await veth_guest(leases[0].slot).reaches(leases[1].slot.host_address)
        for lease in leases[::2]:
            await one.release(lease.slot_id)
        await one.close()
        assert await veth_guest(leases[1].slot).reaches_soon(WEB)  # the first to go takes nothing from the other
        await two.apply(leases[1].slot_id, NetworkPolicy(allow=("10.77.0.0/24",)))
        assert await veth_guest(leases[1].slot).reaches_soon(PRIVATE_WEB)
        await one.start()
        assert await veth_guest(leases[1].slot).reaches_soon(PRIVATE_WEB)  # nor does one that starts
        for lease in leases[1::2]:
            await two.release(lease.slot_id)
        await two.close()
        lease = await one.acquire("veth")  # it had no slot when the other put the host back
        assert await veth_guest(lease.slot).reaches_soon(WEB)
        sh("sysctl -qw net.ipv4.ip_forward=1")
        sh("sysctl -qw net.ipv4.ip_forward=0")  # and the kernel's notion of "off" is every interface
        await until(lambda: veth_guest(lease.slot).reaches(WEB))
        await one.release(lease.slot_id)
        await one.close()
        assert await settled(before, *homes) == {}


async def test_eight_at_once(tmp_path: Path) -> None:
    async with world(tmp_path):
        before = host_state(tmp_path)
        net = made(tmp_path)
        await net.start()
        began = time.perf_counter()
        leases = await asyncio.gather(*(net.acquire("veth" if n % 2 else "tap") for n in range(8)))
        print(f"8 slots at once: {(time.perf_counter() - began) * 1000:.0f} ms")
        guests = [veth_guest(lease.slot) for lease in leases if lease.slot.kind == "veth"]
        answers = await asyncio.gather(
            *(guest.reaches_soon(WEB) for guest in guests), *(guest.lookup("web.example.org") for guest in guests)
        )
        assert answers == [True] * 4 + [WEB] * 4
        await asyncio.gather(*(net.release(lease.slot_id) for lease in leases))
        await net.close()
        assert await settled(before, tmp_path) == {}


async def test_warm_slots(tmp_path: Path) -> None:
    async with world(tmp_path):
        net = made(tmp_path, WARM)
        await net.start()
        times_ms = []
        for _ in range(2):
            await until(lambda: is_warm(net))
            for _ in range(3):
                began = time.perf_counter()
                lease = await net.acquire("veth")
                times_ms.append((time.perf_counter() - began) * 1000)
            assert await veth_guest(lease.slot).reaches_soon(WEB)
        print(f"acquire from warm: median {statistics.median(times_ms):.3f} ms, max {max(times_ms):.3f} ms")
        assert statistics.median(times_ms) < 1
        assert (await net.status()).last_error == ""
        for slot_id in (await net.status()).leased:
            await net.release(slot_id)
        await net.close()


async def test_addresses_put_back_for_another_engine(tmp_path: Path) -> None:
    async with world(tmp_path):
        net = made(tmp_path)
        await net.start()
        lease = await net.acquire("veth")
        sh("ip addr flush dev eth0", lease.slot_id.guest_name)
        assert not await veth_guest(lease.slot).reaches(WEB)
        await net.refit(lease.slot_id)
        assert await veth_guest(lease.slot).reaches_soon(WEB)
        await net.release(lease.slot_id)
        await net.close()


async def test_host_interfaces_that_come_later(tmp_path: Path) -> None:
    async with world(tmp_path):
        sh("ip route del default; ip link set lan down; ip addr flush dev lan")
        before = host_state(tmp_path)
        net = made(tmp_path, COLD.model_copy(update={"host_poll_s": 0.1}))
        await net.start()
        sh("ip addr add 192.168.77.1/24 dev lan; ip link set lan up")
        forwarding = Path("/proc/sys/net/ipv4/conf/lan/forwarding")

        async def forwards() -> bool:
            return forwarding.read_text() == "1\n"

        await until(forwards)
        sh("ip addr flush dev lan; ip link set lan down")
        await net.close()
        assert await settled(before, tmp_path) == {}


async def has_openings() -> bool:
    return "10.77.0.0" in sh("nft list ruleset")


async def test_a_host_whose_rules_were_flushed(tmp_path: Path) -> None:
    """A firewall service does that when it starts. The routers hold meanwhile."""
    async with world(tmp_path):
        before = host_state(tmp_path)
        net = made(tmp_path, COLD.model_copy(update={"host_poll_s": 0.5}))
        await net.start()
        lease, other = await net.acquire("veth"), await net.acquire("veth")
        await net.apply(lease.slot_id, NetworkPolicy(allow=("10.77.0.0/24",)))
        sh("nft flush ruleset")
        assert not await veth_guest(other.slot).reaches(PRIVATE_WEB)
        await until(has_openings)
        assert await veth_guest(lease.slot).reaches_soon(PRIVATE_WEB)
        assert await veth_guest(other.slot).tcp(WEB) == HOST_PUBLIC
        assert not await veth_guest(other.slot).reaches(PRIVATE_WEB)
        for slot_id in (lease.slot_id, other.slot_id):
            await net.release(slot_id)
        await net.close()
        assert await settled(before, tmp_path) == {}


async def test_a_slot_that_cannot_be_taken_over_is_removed(tmp_path: Path) -> None:
    async with world(tmp_path):
        before = host_state(tmp_path)
        net = made(tmp_path)
        await net.start()
        lease = await net.acquire("veth")
        await net.close()
        sh("ip addr del 10.0.2.3/32 dev guest0", lease.slot_id.router_name)  # its DNS server cannot listen
        found = await net.start({lease.slot_id})
        assert found.lost == found.removed == {lease.slot_id} and not found.adopted
        await net.close()
        assert await settled(before, tmp_path) == {}


async def test_refuses_a_pool_that_the_host_uses(tmp_path: Path) -> None:
    async with world(tmp_path):
        before = host_state(tmp_path)
        with pytest.raises(Conflict, match=r"10\.64\.0\.0/10 overlaps the host's route 10\.77\.0\.0/24"):
            await made(tmp_path, NetworkConfig(uplink_pool="10.64.0.0/10")).start()
        assert host_state(tmp_path) == before


async def test_the_pool_has_an_end(tmp_path: Path) -> None:
    async with world(tmp_path):
        before = host_state(tmp_path)
        net = made(tmp_path, COLD.model_copy(update={"uplink_pool": "100.96.0.0/29"}))
        await net.start()
        leases = [await net.acquire("tap") for _ in range(3)]
        with pytest.raises(LimitReached, match="all 3 slots"):
            await net.acquire("tap")
        await net.release(leases[0].slot_id)
        await until(lambda: is_quiet(net))
        with pytest.raises(NotFound):
            await net.apply(leases[0].slot_id, NetworkPolicy())
        await net.acquire("tap")
        for slot_id in (await net.status()).leased:
            await net.release(slot_id)
        await net.close()
        assert await settled(before, tmp_path) == {}


async def test_a_number_that_another_home_took_meanwhile(tmp_path: Path) -> None:
    async with world(tmp_path):
        net = made(tmp_path)
        await net.start()
        sh(f"ip link add {UPLINK_PREFIX}0001 type veth peer name other; ip link set {UPLINK_PREFIX}0001 alias x")
        lease = await net.acquire("tap")
        assert lease.slot_id.number == 2

        await net.release(lease.slot_id)
        await net.close()
        assert "alias x" in sh(f"ip link show {UPLINK_PREFIX}0001")  # it is not ours to remove
        sh(f"ip link del {UPLINK_PREFIX}0001")


async def test_cancelled_acquire_leaves_nothing(tmp_path: Path) -> None:
    async with world(tmp_path):
        before = host_state(tmp_path)
        net = made(tmp_path)
        await net.start()
        for delay_s in (0.0, 0.01, 0.03, 0.06):
            task = asyncio.create_task(net.acquire("veth"))
            await asyncio.sleep(delay_s)
            task.cancel()
            done, _ = await asyncio.wait([task])
            if not done.pop().cancelled():
                await net.release(task.result().slot_id)
        await net.close()
        assert await settled(before, tmp_path) == {}


async def test_requirements_are_found_by_trying(tmp_path: Path) -> None:
    async with world(tmp_path):
        before = host_state(tmp_path)
        found = {one.name: one for one in await requirements()}
        assert all(one.present for one in found.values()), found
        assert len(found) >= 6
        sh("nft 'add table ip other; add chain ip other f { type filter hook forward priority 0; policy drop; }'")
        blocked = {one.name: one for one in await requirements()}["forwarding firewall"]
        assert not blocked.present and "ip other" in blocked.detail and "aenv-u-*" in blocked.fix
        sh("nft delete table ip other")
        taken = {one.name: one for one in await requirements("10.64.0.0/10")}["uplink pool"]
        assert not taken.present
        assert host_state(tmp_path) == before


ROOTLESS = """
import asyncio, os
from pathlib import Path
from aenv_run.errors import Unsupported
from aenv_run.network import Network
from aenv_run.network.requirements import requirements
from aenv_run.paths import Home

async def main():
    (one,) = await requirements()
    assert not one.present and "root" in one.detail, one
    try:
        await Network(Home(Path("/nonexistent"))).start()
    except Unsupported as error:
        print(error)

os.setgroups([])
os.setgid(65534)
os.setuid(65534)  # only now: another user may not be able to read this checkout
asyncio.run(main())
"""


def test_without_root_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", ROOTLESS], capture_output=True, text=True, check=False)
    assert "root with CAP_NET_ADMIN and CAP_SYS_ADMIN" in done.stdout, done.stderr
