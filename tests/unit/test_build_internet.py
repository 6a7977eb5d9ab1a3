"""Which driver a build with internet gets: one that can give it, slower or not."""

from __future__ import annotations

import os
from pathlib import Path

from aenv_build.running.staging_network import lacks_internet
from aenv_run.drivers.protocol import Caps, DriverName
from aenv_run.drivers.select import select
from aenv_run.paths import Home

PLAIN = {"memory_snapshot": True, "live_capture": True, "shares_memory": False, "native_speed": True}


def test_what_lacks_internet(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert lacks_internet(home, Caps(**PLAIN, own_internet=True)) == ""
    assert "no internet here" in lacks_internet(home, Caps(**PLAIN))
    if os.geteuid() == 0:
        home.network.mkdir()
        (home.network / "config.json").write_text('{"mode": "none"}')
        assert lacks_internet(home, Caps(**PLAIN, slot_kind="veth"))


async def test_auto_passes_by_a_driver_that_lacks_what_is_needed(tmp_path: Path) -> None:
    selected = await select("auto", Home(tmp_path), lacks=lambda caps: "" if caps.own_internet else "it has none")
    assert selected.driver.name is DriverName.QEMU
    assert selected.driver.caps.own_internet
