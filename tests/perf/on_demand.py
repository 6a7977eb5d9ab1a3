"""``make bench-on-demand``: from an empty cache to a first command, on demand and against downloading first.

The repository is in a network of its own behind a link whose rate the kernel limits (tc tbf), so bytes are counted
on the wire. The image has files of about ``--mib`` that do not compress; what a guest does is a boot and one
command, and then some files that it reads. Ended by Ctrl-C it leaves no node, engine, namespace or file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aenv_run import disk
from aenv_run.cache import BlobCache
from aenv_run.capture import Capture
from aenv_run.catalog import Catalog
from aenv_run.config import open_repository
from aenv_run.node_client import NodeClient
from aenv_run.paths import Home
from aenv_run.repository import Draft, Repository
from aenv_run.sdk_async import AsyncSandbox
from aenv_run.store.posix import PosixStore
from aenv_run.store.protocol import StoreKey
from aenv_run.types import Architecture, Context, MachineSpec, Name
from tests.contracts.machines import make_tree
from tests.perf import own_host

MIB = 1 << 20
NETNS, ADDRESS, PORT = "store", "10.77.0.2", 8733
DRIVERS = ("gvisor", "qemu")
FILE_MIB, READ_MIB = 4, 64
#: All of the image was fetched before the clock began.
HERE = "all here already"
ON_DEMAND = ("on demand", "on demand, small cache")
#: After the node's start.
SETTLE_S = 4.0
#: What a sample starts without.
CACHED = ("blobs", "verified", "partial", "checked-disks", "roots", "warm")


class FarStore(PosixStore):
    """Commits as a store over a network would."""

    def local_path(self, key: StoreKey) -> Path | None:
        """None: no file of it is one of this machine."""
        return None


@dataclass
class Row:
    """One kind of start."""

    driver: str
    link: str
    how: str
    first_s: list[float] = field(default_factory=list)
    first_mib: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    all_mib: list[float] = field(default_factory=list)


def publish(store: Path, scratch: Path, image_mib: int) -> int:
    """``large:1``: busybox, and files that compress badly; the size of its disk layer."""
    tree = make_tree(scratch / "tree")
    source = random.Random(1)
    for number in range(image_mib // FILE_MIB):
        folder = tree / "data" / f"{number % 32:02}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:05}").write_bytes(source.randbytes(FILE_MIB * MIB))
    machine = MachineSpec(cpus=1, memory_mib=512, disk_mib=image_mib + 512)
    base = scratch / "base.qcow2"
    asyncio.run(disk.make_image(tree, machine.disk_mib, base))
    shutil.rmtree(tree)
    size = base.stat().st_size
    repository = Repository(FarStore(store))
    draft = Draft(architecture=Architecture("amd64"), machine=machine, context=Context())
    snapshot = repository.commit(Capture(scratch, (base,), {}, None), draft)
    Catalog(repository).publish(Name("large"), snapshot.id, [])
    return size


@contextmanager
def link_to(store: Path) -> Iterator[str]:
    """The store's server behind a pair of links; the URL of the repository."""
    for line in (
        f"netns add {NETNS}",
        f"link add near type veth peer name far netns {NETNS}",
        "addr add 10.77.0.1/30 dev near",
        "link set near up",
        f"-n {NETNS} addr add {ADDRESS}/30 dev far",
        f"-n {NETNS} link set far up",
    ):
        subprocess.run(["ip", *line.split()], check=True)
    argv = [sys.executable, "-m", "tests.perf.file_s3", str(store), ADDRESS, str(PORT)]
    server = subprocess.Popen(["ip", "netns", "exec", NETNS, *argv], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        endpoint = f"http://{ADDRESS}:{PORT}"
        yield f"s3://bench?region=us-east-1&endpoint={endpoint}&addressing=path"
    finally:
        server.kill()
        server.wait()
        subprocess.run(["ip", "netns", "del", NETNS], check=False)


def limit(rate: str) -> None:
    """From now on the store sends so much, and a millisecond more is on the way."""
    tc = ["ip", "netns", "exec", NETNS, "tc", "qdisc", "replace", "dev", "far", "root", "tbf"]
    subprocess.run([*tc, "rate", rate, "burst", "256kb", "latency", "200ms"], check=True)


def received_mib() -> float:
    """What came over the link since it was made."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (near,) = [line.split() for line in lines if line.strip().startswith("near:")]
    return int(near[1]) / MIB


async def sample(home: Home, row: Row) -> None:
    """From nothing to a first command, and then to one file of the image."""
    for name in CACHED:
        shutil.rmtree(home.cache / name, ignore_errors=True)
    if row.how == HERE:
        repository = open_repository(None, home)
        snapshot = repository.snapshot(Catalog(repository).resolve("large:1").snapshot_id)
        for blob in snapshot.blobs():
            await asyncio.to_thread(BlobCache(home.cache, repository).path, blob)
    await NodeClient(home).ensure_started()
    await asyncio.sleep(SETTLE_S)
    before = received_mib()
    began = time.monotonic()
    try:
        sandbox = await AsyncSandbox.create("large:1", home=home)
        done = await sandbox.commands.run("true")
        assert done.exit_code == 0
        row.first_s.append(time.monotonic() - began)
        row.first_mib.append(received_mib() - before)
        began = time.monotonic()
        read = f"cat /data/0*/* | dd of=/dev/null bs=1M count={READ_MIB} iflag=fullblock"
        done = await sandbox.commands.run(read, timeout=600)
        assert done.exit_code == 0, done
        row.read_s.append(time.monotonic() - began)
        row.all_mib.append(received_mib() - before)
    finally:
        await NodeClient(home).shutdown(kill=True)
        while home.block_socket.exists():  # noqa: ASYNC110 - another process removes it
            await asyncio.sleep(0.05)


def measure(home: Home, row: Row, rounds: int, settings: dict[str, str]) -> None:
    """``rounds`` samples; prints each."""
    os.environ.update({"AENV_DRIVER": row.driver, **settings})
    for _ in range(rounds):
        asyncio.run(sample(home, row))
        first = f"first {row.first_s[-1]:7.2f} s {row.first_mib[-1]:7.1f} MiB"
        more = f"+{READ_MIB} MiB read {row.read_s[-1]:7.2f} s {row.all_mib[-1]:7.1f} MiB in all"
        print(f"{row.driver:7} {row.link:8} {row.how:24} {first}   {more}", flush=True)


def kinds() -> list[tuple[str, dict[str, str]]]:
    """How, and by which settings."""
    return [
        (ON_DEMAND[0], {"AENV_ON_DEMAND": "on", "AENV_CACHE_MIB": "20480"}),
        (ON_DEMAND[1], {"AENV_ON_DEMAND": "on", "AENV_CACHE_MIB": str(max(16, READ_MIB // 2))}),
        (HERE, {"AENV_ON_DEMAND": "on", "AENV_CACHE_MIB": "20480"}),
        ("download first", {"AENV_ON_DEMAND": "off", "AENV_CACHE_MIB": "20480"}),
    ]


def main() -> None:
    """Measure and print; with ``--json`` also write."""
    parser = argparse.ArgumentParser(prog="tests.perf.on_demand", description=__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow-downloads", type=int, default=1, help="rounds of downloads over 100 Mbit/s")
    parser.add_argument("--drivers", default=",".join(DRIVERS))
    parser.add_argument("--rates", default="1gbit,100mbit")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    own_host.move_there()
    scratch = Path(tempfile.mkdtemp(prefix="aenv-demand-", dir="/var/tmp"))
    rows: list[Row] = []
    try:
        (scratch / "make").mkdir()
        size = publish(scratch / "store", scratch / "make", options.mib)
        print(
            f"{platform.node()}: {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; "
            f"an image of {size / MIB:.0f} MiB; rounds {options.rounds}"
        )
        home = Home(scratch / "home")
        os.environ.update(
            {
                "AENV_FIRST_BOOT_WARMS": "off",
                "AENV_NODE_IDLE_S": "600",
                "AWS_ACCESS_KEY_ID": "bench",
                "AWS_SECRET_ACCESS_KEY": "bench",
            }
        )
        with link_to(scratch / "store") as url:
            os.environ["AENV_REPOSITORY"] = url
            for driver in options.drivers.split(","):
                limit("10gbit")
                measure(home, Row(driver, "10gbit", "(warming up)"), 1, kinds()[0][1])
                for rate in options.rates.split(","):
                    limit(rate)
                    for how, settings in kinds():
                        slow = rate == "100mbit" and how == "download first"
                        rows.append(Row(driver, rate, how))
                        measure(home, rows[-1], options.slow_downloads if slow else options.rounds, settings)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"\np50                                        n  first command       + {READ_MIB} MiB read")
    for row in rows:
        p50 = [statistics.median(values) for values in (row.first_s, row.first_mib, row.read_s, row.all_mib)]
        print(
            f"{row.driver:7} {row.link:8} {row.how:24} {len(row.first_s):2}  {p50[0]:7.2f} s {p50[1]:7.1f} MiB  "
            f"{p50[2]:7.2f} s {p50[3]:7.1f} MiB"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
