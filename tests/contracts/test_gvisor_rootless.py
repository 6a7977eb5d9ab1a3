"""What only gVisor without root has to hold: a disk that is read without a mount, and told by the guest."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import pytest_asyncio

from aenv_run import disk
from aenv_run.drivers.gvisor import GvisorDriver
from aenv_run.drivers.gvisor_level import Level, lacks
from aenv_run.drivers.protocol import Machine
from aenv_run.errors import NoSpace, RestoreIncompatible, Unsupported
from aenv_run.guest import Command, Guest
from aenv_run.paths import Home
from tests.contracts.machines import Bench, make_bench, make_driver, make_tree, need_runsc, prepare_capture, sh

#: Names that a shell, debugfs or a path could take for something else; changed kinds, links, owners, holes.
MESS = """
mkdir /m && cd /m
tab="$(busybox printf 'tab\\there')"
for name in '<12>' '-f' 'a "quoted" one' 'back\\slash' '#note' 'sp  ace' "$tab" '<2>' '..x'; do
  echo "$name" >"./$name"; mkdir "./$name.d"; echo in >"./$name.d/$name"
done
busybox ln -s "$(busybox printf '%0300d' 7)" long; busybox ln -s 'two "q" words' quoted; busybox ln -s /etc outside
busybox mkfifo fifo; busybox mknod node c 300 70000
busybox chown 70000:80000 '<12>'; busybox chmod 4751 '<12>'; busybox chown 5:6 '-f.d'; busybox chown -h 7:8 long
mkdir links; echo one >links/one; i=0
while [ $i -lt 40 ]; do busybox ln links/one links/another-name-that-is-rather-long-$i; i=$((i+1)); done
dd if=/dev/urandom of=sparse bs=1 count=10000 seek=40000000 2>/dev/null
dd if=/dev/zero of=zeroes bs=1k count=100 2>/dev/null
dd if=/dev/urandom of=/seed bs=1k count=300 2>/dev/null
mkdir many; i=0; while [ $i -lt 600 ]; do echo $i >many/number-$i; i=$((i+1)); done
rm -r /srv/deep /srv/kind /srv/dir-no-more; mkdir /srv/kind; echo a file >/srv/dir-no-more
busybox mv /srv/old /srv/new; busybox chmod 0700 /srv/touched
busybox touch -d '2001-02-03 04:05:06' /srv/touched
rm /srv/hard1
"""
#: Everything of the disk, one line a file.
LIST = (
    "cd /; busybox find / -xdev -not -path '/proc*' -not -path '/dev*' -not -path '/sys*' -not -path '/run*'"
    " -not -path '/etc/resolv.conf'"
    " -exec busybox stat -c '%n|%f|%u|%g|%t:%T|%N' {} + | busybox sort;"
    " busybox find / -xdev -type f -not -path '/etc/resolv.conf' -exec busybox stat -c '%n %s %Y' {} +"
    " | busybox sort;"
    " busybox find / -xdev -type f -not -path '/etc/resolv.conf' -exec busybox md5sum {} + | busybox sort;"
    " busybox stat -c '%n %Y' /srv/touched /srv /m /m/links; busybox stat -c '%h' /m/links/one"
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rootless(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A captured machine of the gVisor driver at its lowest level."""
    need_runsc()
    return await make_bench(
        make_driver("gvisor-none", home), home, tmp_path_factory.mktemp("rootless"), "gvisor-none"
    )


async def messy_image(target: Path, scratch: Path, disk_mib: int) -> None:
    tree = make_tree(scratch / "tree")
    root = tree / "srv"
    for name in ("deep/er/est", "kind", "dir-no-more/sub", "touched", "still/here", "old"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text(name)
    (root / "hard1").write_text("hard")
    (root / "hard2").hardlink_to(root / "hard1")
    (root / "kind").rename(root / "was-kind")
    (root / "kind").write_text("a file")
    for number in range(300):
        (root / "still" / f"with a name that takes some room {number}").touch()
    await disk.make_image(tree, disk_mib, target)


async def listing(machine: Machine, *, links: bool = True) -> list[str]:
    """Without the character device: gVisor shows none of an image."""
    told = await sh(machine, LIST if links else LIST.rpartition("; busybox stat -c '%n %Y'")[0])
    return [line for line in told.splitlines() if not line.startswith("/m/node|")]


@pytest.mark.long
async def test_the_disk_is_told_whole_under_every_name(rootless: Bench, tmp_path: Path, home: Home) -> None:
    image = tmp_path / "messy.qcow2"
    await messy_image(image, tmp_path, rootless.machine.disk_mib)
    start = dataclasses.replace(rootless.cold(), disk=(image,))
    async with rootless.running(start) as machine:
        await sh(machine, MESS)
        told = await listing(machine)
        first = await machine.capture(rootless.capture_directory(), memory=True)
        await sh(machine, "rm -r /m/many /m/links; echo more >/m/more; echo x >/seed")
        second_told = await listing(machine, links=False)
        second = await machine.capture(rootless.capture_directory(), memory=False)
    for name in ("gvisor-none", "qemu"):
        other = dataclasses.replace(rootless, driver=make_driver(name, home))
        cold = dataclasses.replace(rootless.cold(), disk=(image, *first.disk))
        async with other.running(cold) as machine:
            assert await listing(machine) == told
        cold = dataclasses.replace(rootless.cold(), disk=(image, *second.disk))
        async with other.running(cold) as machine:
            assert await listing(machine, links=False) == second_told
    # A machine that is restored, and so lies above an older disk than its chain has, tells the same.
    spec = dataclasses.replace(
        rootless.restored(), disk=(image, *first.disk), memory=first.memory, facts=first.facts
    )
    async with rootless.running(spec) as machine:
        assert await listing(machine) == told
        await sh(machine, "rm -r /m/many /m/links; echo more >/m/more; echo x >/seed")
        third_told = await listing(machine, links=False)
        third = await machine.capture(rootless.capture_directory(), memory=False)
    qemu = dataclasses.replace(rootless, driver=make_driver("qemu", home))
    cold = dataclasses.replace(rootless.cold(), disk=(image, *first.disk, *third.disk))
    async with qemu.running(cold) as machine:
        assert await listing(machine, links=False) == third_told
        assert await sh(machine, "busybox stat -c '%f %t:%T' /m/node") == "21a4 12c:11170"


async def test_a_name_that_cannot_be_told_is_refused_with_the_reason(rootless: Bench) -> None:
    async with rootless.child() as machine:
        await sh(machine, "echo 1 >\"/$(busybox printf 'new\\nline')\"")
        with pytest.raises(Unsupported, match=r"line break.*new\\nline"):
            await machine.capture(rootless.capture_directory(), memory=True)
        await sh(machine, "rm /new*; echo 1 >/one")
        capture = await machine.capture(rootless.capture_directory(), memory=False)
    async with rootless.running(rootless.cold(rootless.seed, capture)) as machine:
        assert await sh(machine, "cat /one") == "1"


async def test_more_than_the_disk_holds_fails_the_capture_and_nothing_else(rootless: Bench) -> None:
    async with rootless.child() as machine:
        await sh(machine, f"dd if=/dev/urandom of=/big bs=1M count={rootless.machine.disk_mib} 2>/dev/null")
        await prepare_capture(machine)
        with pytest.raises(NoSpace, match="do not fit on its disk"):
            await machine.capture(rootless.capture_directory(), memory=False)
        await sh(machine, "rm /big")
        await machine.capture(rootless.capture_directory(), memory=False)


async def test_what_a_killed_node_left_of_a_capture_is_in_nobodys_way(rootless: Bench) -> None:
    async with rootless.child() as machine:
        scratch = machine.directory / "disk.pack.scratch" / "files"
        scratch.mkdir(parents=True)
        (scratch / "1").write_text("half")
        (machine.directory / "disk.pack").write_text("half")
        await sh(machine, "echo 1 >/one")
        capture = await machine.capture(rootless.capture_directory(), memory=False)
        assert not list(machine.directory.glob("disk.pack*"))
    async with rootless.running(rootless.cold(rootless.seed, capture)) as machine:
        assert await sh(machine, "cat /one") == "1"


async def test_a_process_that_somebody_stopped_stays_stopped(rootless: Bench) -> None:
    beat = "while :; do echo x >>/dev/shm/$0; sleep 0.1; done"
    async with rootless.child() as machine:
        async with Guest(machine.endpoint) as guest:
            for name in ("running", "stopped"):
                async with guest.start(Command(("/bin/sh", "-c", beat, name), tag=name)):
                    pass
            (pid,) = [one.pid for one in await guest.processes() if one.tag == "stopped"]
        await sh(machine, "while [ ! -s /dev/shm/stopped ]; do sleep 0.05; done")
        await sh(machine, f"kill -STOP {pid} && sleep 0.3")
        await only_one_goes_on(machine)
        capture = await machine.capture(rootless.capture_directory(), memory=True)
        await only_one_goes_on(machine)
    async with rootless.child(rootless.seed, capture) as machine:
        await only_one_goes_on(machine)
        await sh(machine, f"kill -CONT {pid}")
        await sh(machine, "rm /dev/shm/stopped; while [ ! -s /dev/shm/stopped ]; do sleep 0.05; done")


async def only_one_goes_on(machine: Machine) -> None:
    count = "rm -f /dev/shm/running; while [ ! -s /dev/shm/running ]; do sleep 0.05; done; cat /dev/shm/stopped"
    before = await sh(machine, count)
    assert await sh(machine, count) == before


async def test_machines_of_a_chain_share_one_image(rootless: Bench) -> None:
    async with rootless.child() as one, rootless.child() as other:
        images = [machine.directory / "root.erofs" for machine in (one, other)]
        assert len({image.stat().st_ino for image in images}) == 1
        assert all(image.stat().st_mode & 0o222 == 0 for image in images)
        cached = list((rootless.home.cache / "roots").iterdir())
        assert images[0].stat().st_ino in [path.stat().st_ino for path in cached]
        assert {path.suffix for path in cached} - {".lock"} == {".erofs", ".metadata"}


async def test_many_children_at_once_make_the_image_once(rootless: Bench, tmp_path: Path) -> None:
    fresh = dataclasses.replace(rootless, driver=GvisorDriver(Home(tmp_path / "home"), Level.NONE))
    specs = [fresh.restored() for _ in range(4)]
    machines = await asyncio.gather(*(fresh.driver.restore(spec) for spec in specs))
    try:
        assert len({(machine.directory / "root.erofs").stat().st_ino for machine in machines}) == 1
    finally:
        await asyncio.gather(*(machine.kill() for machine in machines))


async def test_memory_is_not_restored_over_another_disk_or_at_another_level(rootless: Bench) -> None:
    other = rootless.root / "other.qcow2"
    await disk.make_image(rootless.root / "tree" / "bin", rootless.machine.disk_mib, other)
    spec = dataclasses.replace(rootless.restored(), disk=(other, *rootless.seed.disk))
    with pytest.raises(RestoreIncompatible, match="another disk"):
        await rootless.driver.restore(spec)
    if not lacks(Level.ROOT):
        with pytest.raises(RestoreIncompatible, match="devices"):
            await make_driver("gvisor", rootless.home).check_restore(rootless.restored())
