"""A tiny snapshot for the end-to-end tests: busybox, 192 MiB, with memory, made once per session."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from aenv_run import disk
from aenv_run.capture import Capture
from aenv_run.catalog import Catalog
from aenv_run.config import open_repository
from aenv_run.drivers.protocol import BootSpec
from aenv_run.drivers.select import select
from aenv_run.guest import Guest
from aenv_run.paths import Home
from aenv_run.repository import Draft
from aenv_run.snapshot import Snapshot
from aenv_run.types import Architecture, Context, MachineSpec, Name, Tag

MACHINE = MachineSpec(cpus=1, memory_mib=192, disk_mib=128)
CONTEXT = Context(env={"FROM_IMAGE": "yes"}, workdir="/srv", user="root")
APPLETS = [
    "sh",
    "cat",
    "date",
    "dd",
    "echo",
    "env",
    "false",
    "hostname",
    "id",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "ps",
    "printf",
    "pwd",
    "rm",
    "sleep",
    "stty",
    "sync",
    "test",
    "touch",
    "true",
    "wc",
]


def _make_tree(root: Path) -> Path:
    for name in ("bin", "dev", "etc", "proc", "root", "srv", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox, "the tests need busybox: apt install busybox-static"
    shutil.copy(busybox, root / "bin" / "busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


async def make_tiny(home: Home, scratch: Path, *, driver: str | None = None, name: str = "tiny") -> Snapshot:
    """Boot the image once, capture it, publish it as version 1 of ``name``."""
    selected = await select(driver or os.environ.get("AENV_DRIVER", "auto"), home)
    image = scratch / "base.qcow2"
    tree = await asyncio.to_thread(_make_tree, scratch / "tree")
    await disk.make_image(tree, MACHINE.disk_mib, image)
    machine_directory = scratch / "machine"
    machine_directory.mkdir(mode=0o700)
    machine = await selected.driver.boot(BootSpec(MACHINE, (image,), machine_directory, ephemeral=True))
    try:
        async with Guest(machine.endpoint) as guest:
            await guest.wait_ready(60)
            await guest.settle()
            await guest.detach()
        capture = await machine.capture(scratch / "capture", memory=True, keep_running=False)
    finally:
        await machine.kill()
    whole = Capture(capture.directory, (image, *capture.disk), capture.memory, capture.facts)
    repository = open_repository(str(home.repository), home)
    draft = Draft(architecture=Architecture("amd64"), machine=MACHINE, context=CONTEXT)
    snapshot = await asyncio.to_thread(repository.commit, whole, draft)
    await asyncio.to_thread(Catalog(repository).publish, Name(name), snapshot.id, [Tag("latest")])
    shutil.rmtree(scratch)
    return snapshot
