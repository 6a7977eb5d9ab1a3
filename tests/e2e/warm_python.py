"""Snapshots of ``recipes/warm-python.yaml`` on a small base: ``warm-python``, and ``plain`` without its hook.

The interpreter is the host's own, with exactly the modules that the program imports, so that no bootstrap of
minutes is needed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from aenv_run.catalog import Catalog
from aenv_run.config import open_repository
from aenv_run.drivers.protocol import DriverName
from aenv_run.paths import Home
from tests.contracts.machines import need_runsc
from tests.e2e.test_build import make_base

DRIVERS = (DriverName.QEMU, DriverName.GVISOR)
ROOT = Path(__file__).parents[2]
SERVER = ROOT / "examples/warm-python/server.py"
PORT = 8000
#: How old the snapshot is when its children are made.
AGE_S = 120.0
ASK = ("/bin/busybox", "nc", "127.0.0.1", str(PORT))
#: Run beside the program, it names the files of all that it imports.
LISTING = """\
import json, runpy, sys
runpy.run_path(sys.argv[1])
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
print(json.dumps([sys.executable, *(file for file in files if file)]))
"""


@dataclass(frozen=True)
class Answer:
    """What the program saw; ``random`` is the seeded generator's, ``born`` was drawn when it started."""

    time_s: float
    getrandom: str
    uuid4: str
    boot_id: str
    machine_id: str
    hostname: str
    random: float
    born: str


def answer(output: str) -> Answer:
    """What ``ASK`` printed."""
    return Answer(**json.loads(output))


class Warm:
    """A home in which ``aenv-build`` makes the snapshots with one driver: begun at once, awaited when needed."""

    def __init__(self, folder: Path, home: Home, driver: DriverName) -> None:
        self.folder, self.home = folder, home
        make_base(folder / "root.tar")
        with tarfile.open(folder / "root.tar", "a") as tar:
            _add_python(tar)
        (folder / "recipe.yaml").write_text(_recipe())
        command = [
            sys.executable,
            "-m",
            "aenv_build.cli",
            str(folder / "recipe.yaml"),
            "--home",
            str(home.root),
        ]
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self._build = subprocess.Popen([*command, "--driver", driver, "--json"], stdout=out, stderr=err)

    def wait(self) -> None:
        """Until the snapshots are there and ``AGE_S`` old; most of that has passed while other tests ran."""
        assert self._build.wait() == 0, (self.folder / "err").read_text()
        (snapshot_id, *_) = [
            out["snapshot_id"] for out in json.loads((self.folder / "out").read_text())["outputs"]
        ]
        entries = Catalog(open_repository(None, self.home)).entries()
        (named_at, *_) = [entry.created_at for entry in entries if entry.snapshot_id == snapshot_id]
        taken_s = datetime.fromisoformat(named_at).timestamp()
        time.sleep(max(0.0, taken_s + AGE_S - time.time()))

    def close(self) -> None:
        """End the build if it still runs."""
        self._build.terminate()
        self._build.wait()


def need(driver: DriverName) -> None:
    """Skip where its guests cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("a base with its files' owners can only be unpacked by root")
    if driver is DriverName.GVISOR:
        need_runsc()


def _recipe() -> str:
    """The recipe as it is, but for its base and its sizes, and with a second output."""
    recipe = yaml.safe_load((ROOT / "recipes/warm-python.yaml").read_text())
    recipe |= {"base": {"archive": "root.tar"}, "machine": {"memory": "192MiB", "disk": "160MiB"}}
    recipe["steps"][0]["copy"]["from"] = str(SERVER)
    recipe["outputs"].append({"name": "plain"})
    return json.dumps(recipe)


def _add_python(tar: tarfile.TarFile) -> None:
    """The interpreter, its modules and shared libraries, each where it is on the host."""
    listing = subprocess.run(
        [os.path.realpath(sys.executable), "-I", "-S", "-c", LISTING, SERVER],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    executable, *files = json.loads(listing.stdout)
    native = [executable, *(file for file in files if ".so" in file)]
    for path in sorted({executable, *files, *_libraries(native)} - {str(SERVER)}):
        tar.add(os.path.realpath(path), arcname=path.lstrip("/"))
    link = tarfile.TarInfo("bin/python3")
    link.type, link.linkname = tarfile.SYMTYPE, executable
    tar.addfile(link)


def _libraries(files: Iterable[str]) -> set[str]:
    listing = subprocess.run(["ldd", *files], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(/\S+) \(0x", listing))
