"""The verdict on /dev/kvm, and what of the host is remembered until it boots again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aenv_run import process
from aenv_run.drivers import kvm_probe, qemu_host
from aenv_run.drivers.select import all_probes, select
from aenv_run.errors import InvalidInput, Unsupported
from aenv_run.paths import Home


@pytest.mark.parametrize(
    ("selector", "cost_ns", "trapped", "verdict"),
    [
        (0x10, 0.4, True, "native"),
        (0x10, 0.4, False, "emulated"),
        (0x10, 1600.0, True, "emulated"),
        (0x10, None, False, "emulated"),
        (0x33, 0.4, True, "pvm"),
        (None, None, False, "emulated"),
    ],
)
def test_judge(selector: int | None, cost_ns: float | None, trapped: bool, verdict: str) -> None:
    assert kvm_probe.judge(selector, cost_ns, trapped) == verdict


@pytest.mark.parametrize("verdict", ["native", "pvm", "emulated", "none"])
def test_only_native_uses_kvm_and_one_sentence_says_why(verdict: str) -> None:
    mode, why = qemu_host.explain_mode(verdict, "detail", pvm_host=True)
    assert mode == ("kvm" if verdict == "native" else "tcg")
    assert "/dev/kvm" in why
    assert ("software emulation" in why) == (verdict != "native")


async def test_the_probe_ends_and_prints_one_verdict() -> None:
    done = await process.run([sys.executable, "-I", kvm_probe.__file__], timeout_s=5.0)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] in ("none", "native", "emulated", "pvm")


LOG = """[    0.000060] tsc: Detected 2596.128 MHz processor
[    1.2] tsc: Refined TSC clocksource calibration: 2596.601 MHz
"""


@pytest.mark.parametrize(
    ("log", "cpuinfo", "khz"),
    [
        (LOG, "", 2_597_000),
        (LOG.splitlines()[0], "cpu MHz\t\t: 1000.0", 2_596_000),
        ("", "processor: 0\ncpu MHz\t\t: 2445.424\n", 2_445_000),
        ("", "", 0),
    ],
)
def test_tsc_frequency(log: str, cpuinfo: str, khz: int) -> None:
    assert qemu_host.parse_tsc_khz(log, cpuinfo) == khz


async def test_an_answer_is_remembered_until_its_key_changes(tmp_path: Path) -> None:
    home, asked = Home(tmp_path), 0

    async def find() -> str:
        nonlocal asked
        asked += 1
        return f"answer {asked}"

    assert [await qemu_host.remembered(home, "x", "a", find) for _ in range(2)] == ["answer 1"] * 2
    assert await qemu_host.remembered(home, "x", "b", find) == "answer 2"
    (tmp_path / "cache" / "host" / "x.json").write_text("{damaged")
    assert await qemu_host.remembered(home, "x", "b", find) == "answer 3"
    assert [path.name for path in (tmp_path / "cache" / "host").iterdir()] == ["x.json"]


async def test_a_driver_that_is_not_there_is_refused_with_what_exists(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="firecracker") as error:
        await select("firecracker", Home(tmp_path))
    assert "qemu" in error.value.fix
    with pytest.raises(InvalidInput, match="'qemo'"):
        await select("qemo", Home(tmp_path))


async def test_what_is_missing_is_named_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_GUEST_DIR", str(tmp_path / "nothing"))
    probe = (await all_probes(Home(tmp_path)))[0]
    assert not probe.usable
    (guest,) = [one for one in probe.requirements if one.name.startswith("guest")]
    assert (guest.present, bool(guest.fix)) == (False, True)
    assert "nothing" in probe.why


def test_versions_compare_as_numbers() -> None:
    assert qemu_host.version_numbers("10.0.2 (Debian 1:10.0.2+ds-2)") >= qemu_host.MIN_VERSION
    assert qemu_host.version_numbers("7.2.19 (Debian 1:7.2+dfsg-7)") < qemu_host.MIN_VERSION
    assert qemu_host.version_numbers("unknown") < qemu_host.MIN_VERSION
