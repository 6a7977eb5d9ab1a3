"""QEMU on a network slot: memory crosses between user networking and a tap. Needs root; touches nothing real."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_run.drivers.protocol import DriverName
from aenv_run.guest import Guest
from aenv_run.network import Network, NetworkConfig
from aenv_run.paths import Home
from tests.contracts.machines import Bench, prepare_capture, sh
from tests.contracts.network_world import NAME_SERVER, WEB, world

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
COLD = NetworkConfig(low_water=0, high_water=0, nameservers=(NAME_SERVER,))
FETCH = f"busybox nc -w 5 {WEB} 80 </dev/null | busybox head -n 1"


async def test_memory_crosses_between_user_networking_and_a_slot(bench: Bench, tmp_path: Path) -> None:
    if bench.driver.name is not DriverName.QEMU:
        pytest.skip("only QEMU has user networking")
    async with world(tmp_path):
        net = Network(Home(tmp_path), COLD, run_directory=tmp_path / "run")
        await net.start()
        lease = await net.acquire("tap")
        spec = replace(bench.restored(), network=lease.slot)
        machine = await bench.driver.restore(spec)
        try:
            assert (machine.endpoint.host, machine.endpoint.port) == (lease.slot.host_address, 49983)
            started_s = time.monotonic()
            async with Guest(machine.endpoint) as guest:
                await guest.wait_ready(30)
            # The guest knew another gateway by another hardware address; to learn the new one must not take long.
            assert time.monotonic() - started_s < 3
            assert (await sh(machine, FETCH)).count(".") == 3
            assert "web.example.org" in await sh(machine, "busybox nslookup web.example.org 10.0.2.3")
            await prepare_capture(machine)
            capture = await machine.capture(bench.capture_directory(), memory=True)
        finally:
            await machine.kill()
            await net.release(lease.slot_id)
        async with bench.child(bench.seed, capture) as back:  # on user networking again
            assert back.endpoint.host == "127.0.0.1"
            assert await sh(back, "echo it answers") == "it answers"
        await net.close()
