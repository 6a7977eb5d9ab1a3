"""aenv-build on a tiny base: cache, branches, verify, failure, two builds at once, Ctrl-C. Needs a driver."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.config import open_repository
from aenv_run.digest import digest_file
from aenv_run.paths import Home

BUSYBOX = shutil.which("busybox")
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a base with its files' owners can only be unpacked by root"),
    pytest.mark.skipif(BUSYBOX is None, reason="the tiny base needs a static busybox"),
]
APPLETS = ("sh", "cat", "ls", "echo", "sleep", "mkdir", "rm", "touch", "test", "true", "false", "ps")
TOKEN = "a-token-of-the-tiny-recipe"
RECIPE = """
version: 1
name: tiny
base: {archive: root.tar}
machine: {memory: 256MiB, disk: 64MiB}
env: {GREETING: hello}
secrets: [TINY_TOKEN]
steps:
  - {id: text, write: {/srv/bin/hello: "echo hello\n"}}
  - id: one
    run: |
      echo "$GREETING" > /srv/one; sleep 600 &
      test "$(cat /run/secrets/TINY_TOKEN)" = "$TINY_TOKEN"; echo "<$TINY_TOKEN>"
    secrets: [TINY_TOKEN]
  - id: two
    run: |
      test ! -e /run/secrets; test -z "$TINY_TOKEN"; test "$(sh /srv/bin/hello)" = hello
      test "$(cat /srv/one)" = hello; echo 2 > /srv/two
  - {id: side, needs: [one], run: 'mkdir /srv/d; echo side > /srv/d/side'}
  - {id: merged, needs: [two], copy: {from: {step: side, path: /srv/d}, to: /opt}}
  - {id: check, verify: 'test "$(cat /opt/side)" = side; test ! -e /srv/d; echo spoilt > /srv/two'}
outputs: [{memory: true}]
"""


def make_base(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "root", "run", "srv", "opt"):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        assert BUSYBOX is not None
        tar.add(Path(BUSYBOX).resolve(), arcname="bin/busybox")
        for applet in APPLETS:
            member = tarfile.TarInfo(f"bin/{applet}")
            member.type, member.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(member)
        data = b"root:x:0:0:root:/root:/bin/sh\n"
        member = tarfile.TarInfo("etc/passwd")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the base and a home, shared so that later tests find earlier results in the cache."""
    folder = tmp_path_factory.mktemp("b")
    make_base(folder / "root.tar")
    yield folder
    shutil.rmtree(folder)


class Built:
    """A finished aenv-build."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out.decode(), err.decode()

    @property
    def result(self) -> dict[str, object]:
        loaded: dict[str, object] = json.loads(self.out)
        return loaded


async def start(place: Path, text: str, *arguments: str) -> asyncio.subprocess.Process:
    recipe = place / f"{time.monotonic_ns()}.yaml"
    recipe.write_text(text)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aenv_build.cli", str(recipe), "--home", str(place / "h"), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "TINY_TOKEN": TOKEN},
    )  # fmt: skip


async def build(place: Path, text: str, *arguments: str) -> Built:
    process = await start(place, text, *arguments)
    out, err = await process.communicate()
    return Built(process.returncode or 0, out, err)


def assert_clean(place: Path) -> None:
    """Nothing of a build is left but what is committed, and that is whole."""
    home = Home(place / "h")
    assert not list(home.staging.iterdir())
    report = check(open_repository(None, home))
    assert not report.problems, report.problems
    assert not users_of(home.staging)


def assert_nowhere(place: Path, value: str, *shown: str) -> None:
    """No file of the folder, home and repository in it, holds the value; nor was it shown."""
    assert not any(value in text for text in shown)
    for path in place.rglob("*"):
        assert not path.is_file() or value.encode() not in path.read_bytes(), path


def users_of(directory: Path) -> list[str]:
    """Processes that work in ``directory``, have a file of it open or see a mount in it."""
    place, found = str(directory), []
    for process in Path("/proc").glob("[0-9]*"):
        links = [process / "cwd", process / "root"]
        with suppress(OSError):
            links += (process / "fd").iterdir()
        for link in links:
            with suppress(OSError):
                if str(link.readlink()).startswith(place):
                    found.append(f"{link}: {link.readlink()}")
        with suppress(OSError):
            mounts = (process / "mountinfo").read_text().splitlines()
            found += [f"{process}: {mount}" for mount in mounts if f" {place}" in mount]
    return found


async def test_build_then_cache(place: Path) -> None:
    """Two at once: each step runs once, both get one snapshot. A third finds all of it."""
    first, second = await asyncio.gather(
        build(place, RECIPE, "--json", "--events", "json"), build(place, RECIPE, "--json", "--events", "json")
    )
    assert (first.code, second.code) == (0, 0), first.err + second.err
    snapshots = {json.dumps(built.result["outputs"][0]["snapshot_id"]) for built in (first, second)}  # type: ignore[index]
    assert len(snapshots) == 1
    assert first.result["outputs"][0]["version"] == second.result["outputs"][0]["version"] == "1"  # type: ignore[index]
    assert_clean(place)
    entries = Catalog(open_repository(None, Home(place / "h"))).entries()
    (entry,) = [found for found in entries if found.name == "tiny"]
    assert entry.built is not None and entry.built.verified == ("check",)
    assert entry.built.base == "archive root.tar" and entry.built.base_digest == digest_file(place / "root.tar")

    assert_nowhere(place, TOKEN, first.out + first.err + second.out + second.err)

    again = await build(place, RECIPE, "--json", "--explain")
    assert again.code == 0 and again.result["misses"] == 0, again.err
    assert f'"{again.result["outputs"][0]["snapshot_id"]}"' in snapshots  # type: ignore[index]

    plan = await build(place, RECIPE.replace("echo 2", "echo 3"), "--plan", "--explain")
    assert "two" in plan.out and "miss, changed: run" in plan.out and "the state it starts from" in plan.out


async def test_one_recipe_is_one_snapshot_in_every_repository(place: Path) -> None:
    """Where and when it was built is in the version's record, so what has equal bytes has one id."""
    text = RECIPE[: RECIPE.index("steps:")] + "steps: [{id: there, workdir: /srv}]\n"
    recipe = place / "same.yaml"
    recipe.write_text(text.replace("name: tiny", "name: same"))
    ids = set()
    for home in (place / "h2", place / "h3"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "aenv_build.cli", str(recipe), "--home", str(home), "--json",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await process.communicate()
        assert process.returncode == 0
        ids.add(json.loads(out)["outputs"][0]["snapshot_id"])
        (entry,) = Catalog(open_repository(None, Home(home))).entries()
        assert entry.built is not None and entry.built.host and entry.built.at
    assert len(ids) == 1


async def test_failures_say_what_and_how(place: Path) -> None:
    """A failed step keeps what is done before it, names nothing, and with --keep leaves its state to enter."""
    text = RECIPE.replace("name: tiny", "name: broken").replace("echo 2 > /srv/two", "echo why; false")
    built = await build(place, text, "--keep")
    assert built.code == 1, built.err
    assert "error: step 'two' (run) exited with 1; its last output:\n  | why\n" in built.err
    assert "fix: enter its state: aenv start " in built.err
    assert "Traceback" not in built.err and "broken:" not in built.out
    assert_clean(place)

    text = RECIPE.replace("name: tiny", "name: broken").replace("verify: 'test", "verify: 'echo no; exit 3; test")
    built = await build(place, text)
    assert built.code == 1 and "error: step 'check' (verify) exited with 3, not 0" in built.err, built.err
    assert "[broken]" not in built.out and "again with --keep" in built.err
    assert_clean(place)


async def test_a_machine_that_ends_says_how_and_gets_no_wrong_advice(place: Path) -> None:
    text = RECIPE.replace("name: tiny", "name: dark").replace(
        "echo 2 >", "busybox poweroff -f || kill -9 $PPID; sleep 60; echo 2 >"
    )
    built = await build(place, text)
    assert built.code == 72, built.err
    died = built.err.partition("the machine died during step 'two': ")[2].partition("\n")[0]
    assert "shut down" in died, built.err
    assert "must not shut its machine down" in built.err and "memory" not in built.err.partition("fix:")[2]
    assert_clean(place)


async def test_started_processes_live_on(place: Path) -> None:
    """A step after a start, and a verify, run in restored machines in which the process goes on."""
    text = (
        RECIPE[: RECIPE.index("  - id: two")].replace("name: tiny", "name: served")
        + """
  - {id: warm, checkpoint: true}
  - {id: ticks, start: 'while true; do echo x >> /tmp/ticks; sleep 1; done', ready: test -s /tmp/ticks}
  - {id: after, run: 'test -s /tmp/ticks; echo after > /srv/after'}
  - {id: alive, verify: 'cat /srv/after; cat /tmp/ticks > /tmp/a; sleep 3; test /tmp/ticks -nt /tmp/a'}
"""
    )
    built = await build(place, text, "--json")
    assert built.code == 0, built.err
    assert built.result["outputs"][0]["has_memory"] is True  # type: ignore[index]
    assert_clean(place)


@pytest.mark.parametrize("wait_for", ["stage_started", "stage_output"])
async def test_interrupt_leaves_nothing(place: Path, wait_for: str) -> None:
    """Ctrl-C while a machine boots, and while a command runs."""
    text = RECIPE.replace("name: tiny", "name: stopped").replace("echo 2", f"echo {wait_for}; sleep 600; echo 2")
    process = await start(place, text, "--events", "json")
    assert process.stderr is not None
    async for line in process.stderr:
        event = json.loads(line)
        if event["event"] == wait_for and event["step"] == "two":
            break
    if wait_for == "stage_output":
        assert users_of(Home(place / "h").staging), "what a build leaves is looked for in the wrong places"
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 130, err
    assert err.decode().splitlines()[-2].startswith("error: interrupted: every machine was ended")
    assert b"Traceback" not in err
    assert_clean(place)


async def test_cells_share_steps_and_one_that_takes_too_long_ends_no_other(place: Path) -> None:
    """A matrix on real machines: the shared step runs once; a step over its time is tried again, then fails."""
    text = (
        RECIPE[: RECIPE.index("  - id: two")].replace("name: tiny", "name: cell-{{ matrix.nap }}")
        + "  - {id: nap, run: 'echo asleep; sleep {{ matrix.nap }}', timeout: 2s, retry: 1}\n"
    ).replace("base:", "matrix: {nap: ['0', '600']}\nbase:")
    built = await build(place, text, "--json", "--events", "json")
    assert built.code == 1, built.err
    events = [json.loads(line) for line in built.err.splitlines() if line.startswith("{")]
    tries = [(event["cell"], event["attempt"]) for event in events if event["event"] == "stage_retried"]
    assert tries == [("nap=600", 1)]
    said = [event for event in events if event["event"] == "stage_output" and event["step"] == "one"]
    assert len(said) <= 1, "it runs once, or was cached by another test"
    failed = next(event for event in events if event["event"] == "build_failed")
    assert (
        failed["code"] == "step_failed" and "1 of 2 cells failed:\ncell nap=600: step 'nap'" in failed["message"]
    )
    assert [out["name"] for out in built.result["outputs"]] == ["cell-0"]  # type: ignore[attr-defined]
    assert_clean(place)
