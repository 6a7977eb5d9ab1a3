"""Small parts of the builder: reports, files, output lines, the schedule, locks."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest

from aenv_build.cache.locks import key_lock
from aenv_build.language.load import load
from aenv_build.planning.files import disk_limit, examine, holds_directory, strip_top, write_tar
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.plan import Plan, make_plan
from aenv_build.planning.schedule import make_schedule
from aenv_build.reports.events import BuildEvent, StageOutput
from aenv_build.running.junit import failed_tests
from aenv_build.running.ready import listens
from aenv_build.running.steps import advice
from aenv_build.running.tail import Tail
from aenv_run.errors import Conflict, InvalidInput, ProtocolError, TooLarge
from aenv_run.types import Architecture, Digest, MachineSpec, StageKey
from aenv_run.untar import Limit

FACTS = HostFacts(Architecture("amd64"), Digest("sha256:" + "0" * 64))


def test_junit_names_failed_and_errored_tests() -> None:
    report = b"""<testsuites><testsuite><testcase classname="t.a" name="ok"/>
    <testcase classname="t.a" name="bad"><failure message="x">y</failure></testcase>
    <testcase classname="t.b" name="worse"><error/></testcase>
    <testcase name="lone"><skipped/></testcase></testsuite></testsuites>"""
    assert failed_tests(report) == {"t.a::bad", "t.b::worse"}


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (b"<!DOCTYPE x [<!ENTITY a 'b'>]><testsuite/>", "document type"),
        (b"<!DOCTYPE x SYSTEM 'file:///etc/passwd'><testsuite/>", "document type"),
        (b"<testsuite>" + b"<a>" * 100, "nested deeper"),
        (b"<testsuite>", "not well-formed"),
        (b"<html/>", "not JUnit"),
        (b"", "not well-formed"),
    ],
)
def test_junit_from_a_hostile_sandbox(report: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        failed_tests(report)


def test_tar_of_copied_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub/run").write_text("#!")
    (root / "sub/run").chmod(0o700)
    (root / "out").symlink_to("/etc/passwd")
    files = examine(root)
    write_tar(files, tmp_path / "t.tar")
    with tarfile.open(tmp_path / "t.tar") as tar:
        found = {m.name: (m.mode, m.uid, m.mtime, m.linkname) for m in tar}
    assert found == {
        "out": (0o644, 0, 0, "/etc/passwd"),
        "sub": (0o755, 0, 0, ""),
        "sub/run": (0o755, 0, 0, ""),
    }
    (root / "sub/run").write_text("changed")
    with pytest.raises(Conflict, match="changed while the build ran"):
        write_tar(files, tmp_path / "t.tar")


def test_a_sandboxes_tar_is_renamed_only(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a").write_text("a")
    (tmp_path / "d/b").hardlink_to(tmp_path / "d/a")
    for source, is_directory, names in (("d", True, ["a", "b"]), ("d/a", False, ["new"])):
        with tarfile.open(tmp_path / "in.tar", "w") as tar:
            tar.add(tmp_path / source, arcname=Path(source).name)
        assert holds_directory(tmp_path / "in.tar") is is_directory
        strip_top(tmp_path / "in.tar", tmp_path / "out.tar", Limit(1, "one byte"), name="new")
        with tarfile.open(tmp_path / "out.tar") as tar:
            assert sorted(tar.getnames()) == names
            assert all(member.linkname in {"", "a"} for member in tar)


def test_a_sandboxes_tar_is_bounded_and_its_tricks_are_errors_of_ours(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        for name in ("a", "b"):
            member = tarfile.TarInfo(name)
            member.size = 600
            tar.addfile(member, io.BytesIO(bytes(600)))
    with pytest.raises(TooLarge, match="the disk"):
        strip_top(tmp_path / "in.tar", tmp_path / "out.tar", Limit(1000, "the disk"), name="new")
    (tmp_path / "in.tar").write_bytes(b"junk" * 256)
    with pytest.raises(ProtocolError):
        strip_top(tmp_path / "in.tar", tmp_path / "out.tar", Limit(1000, "the disk"), name="new")
    with pytest.raises(ProtocolError):
        holds_directory(tmp_path / "in.tar")
    assert disk_limit(MachineSpec(disk_mib=64)).max_bytes == 64 << 20


@pytest.mark.parametrize(
    ("reason", "console", "word"),
    [
        ("the guest shut down or rebooted", "", "must not shut"),
        ("the guest's kernel panicked", "Kernel panic - not syncing: Fatal exception", "run the build again"),
        ("the guest's kernel panicked", "Kernel panic - not syncing: System is deadlocked on memory", "again"),
        ("the guest's kernel panicked", "Kernel panic - not syncing: Out of memory: system-wide", "more memory"),
        ("its process ended", "sh invoked oom-killer: gfp_mask", "more memory"),
        ("its process ended by SIGKILL", "", "run the build again"),
    ],
)
def test_advice_for_a_dead_machine_goes_by_how_it_died(reason: str, console: str, word: str) -> None:
    assert word in advice(reason, console)
    assert ("memory" in advice(reason, console)) is (word == "more memory")


def test_socket_is_not_copied(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="socket, pipe or device"):
        examine(tmp_path)


def test_tail_splits_lines_and_disarms_control_characters() -> None:
    told: list[BuildEvent] = []
    tail = Tail("s", told.append)
    for chunk in (b"on", b"e\ntw\xc3", b"\xb6\n\x1b[31mred\x07\r\n", b"rest"):
        tail.feed("stdout", chunk)
    assert tail.end() == ["one", "twö", "�[31mred�", "rest"]
    assert [event.text for event in told if isinstance(event, StageOutput)] == list(tail.lines)
    for number in range(100):
        tail.feed("stderr", f"{number}\n".encode())
    assert len(tail.end()) == 20


def test_listening_port() -> None:
    row = "   0: 0100007F:1538 00000000:0000 {} 00000000:00000000 00:00000000 00000000"
    assert listens("header\n" + row.format("0A"), 5432)
    assert not listens(row.format("01"), 5432) and not listens(row.format("0A"), 80)


def plan_of(folder: Path, steps: str) -> Plan:
    (folder / "a.tar").write_bytes(b"x")
    (folder / "r.yaml").write_text(f"version: 1\nname: n\nbase: {{archive: a.tar}}\nsteps:\n{steps}")
    return make_plan(load(folder / "r.yaml"), FACTS)


STEPS = """
  - {id: a, run: a}
  - {id: b, run: b}
  - {id: check, verify: c}
  - {id: side, needs: [a], run: d}
  - {id: where, needs: [b], workdir: /srv}
  - {id: c, run: e}
  - {id: late, needs: [c, side], copy: {from: {step: side, path: /x}, to: /x}}
"""


def test_parents(tmp_path: Path) -> None:
    stages = plan_of(tmp_path, STEPS).stages
    parents = {step: stage.parent for step, stage in stages.items()}
    assert parents == {
        "a": None, "b": "a", "check": "b", "side": "a", "where": "b", "c": "where", "late": "c",
    }  # fmt: skip
    assert stages["late"].waits == ("side",) and stages["c"].context.workdir == "/srv"
    assert stages["where"].key == stages["b"].key


def test_a_need_that_is_a_verify_only_orders(tmp_path: Path) -> None:
    stages = plan_of(
        tmp_path, "  - {id: a, run: a}\n  - {id: v, verify: v}\n  - {id: b, needs: [v], run: b}\n"
    ).stages
    assert (stages["b"].parent, stages["b"].waits) == ("a", ("v",))


def test_schedule_runs_what_is_missing_and_wanted(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, STEPS)
    everything = make_schedule(plan, set(), {0})
    assert everything.needed == {"a", "b", "check", "side", "c", "late"} and everything.base_needed
    assert everything.heirs == {"a": "b", "b": "c"}, "late waits for another branch, so it boots its own machine"
    tail = make_schedule(plan, {"b", "check", "side"}, {0})
    assert tail.needed == {"c", "late"} and not tail.base_needed, "a is missing, and nothing needs it"
    assert not make_schedule(plan, {"a", "b", "check", "side", "c", "late"}, set()).needed


async def test_key_lock_is_held_by_one(tmp_path: Path) -> None:
    order: list[str] = []
    key = StageKey("a" * 64)

    async def waits() -> None:
        order.append("wait")

    async def hold(name: str) -> None:
        async with key_lock(tmp_path / "locks", key, waits):
            order.append(f"{name} in")
            await asyncio.sleep(0.05)
            order.append(f"{name} out")

    await asyncio.gather(hold("x"), hold("y"))
    first, second = order[0][0], "y" if order[0][0] == "x" else "x"
    assert order == [f"{first} in", "wait", f"{first} out", f"{second} in", f"{second} out"]
