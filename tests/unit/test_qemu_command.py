"""QEMU's command line: each trap that was measured is kept out of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from aenv_run.drivers import qemu_command
from aenv_run.drivers.protocol import BootSpec
from aenv_run.drivers.qemu_command import Cpu
from aenv_run.drivers.qemu_machine import clean_console
from aenv_run.drivers.qemu_ram import PRELOADED_PATH, Handover
from aenv_run.types import MachineSpec

TCG = Cpu("tcg", 2_596_000)


def command(
    *, internet: bool = False, memory_mib: int = 512, cpu: Cpu = TCG, preloaded: bool = False
) -> list[str]:
    spec = BootSpec(MachineSpec(memory_mib=memory_mib), (Path("/a,b/base"),), Path("/m"), internet=internet)
    ram = Handover(PRELOADED_PATH if preloaded else Path("/r,share=on/ram"), preloaded)
    return qemu_command.common(
        Path("qemu"), spec, spec.disk, cpu, ram, Path("top"), "disk-001",
        (qemu_command.network(internet),),
    )  # fmt: skip


def after(argv: list[str], option: str) -> list[str]:
    return [value for name, value in pairwise(argv) if name == option]


def test_ram_is_private_and_its_file_can_never_change() -> None:
    (memory,) = after(command(), "-object")
    assert json.loads(memory) == {
        "qom-type": "memory-backend-file", "id": "mem", "size": 512 << 20, "mem-path": "/r,share=on/ram",
        "share": False, "readonly": True, "rom": "off",
    }  # fmt: skip


def test_free_pages_are_taken_back_only_where_the_base_is_guarded() -> None:
    (memory,) = after(command(preloaded=True), "-object")
    assert json.loads(memory)["mem-path"] == str(PRELOADED_PATH)
    assert not PRELOADED_PATH.exists()
    for preloaded in (True, False):
        *_, balloon = after(command(preloaded=preloaded), "-device")
        assert json.loads(balloon) == {
            "driver": "virtio-balloon-device", "free-page-reporting": preloaded, "page-poison": False,
        }  # fmt: skip
    assert qemu_command.shape(reporting=True) != qemu_command.shape(reporting=False)


def test_exactly_two_gib_does_not_boot_and_is_never_asked_for() -> None:
    assert after(command(memory_mib=2048), "-m") == ["2052M"]
    assert json.loads(after(command(memory_mib=2048), "-object")[0])["size"] == 2052 << 20
    assert after(command(memory_mib=2047), "-m") == ["2047M"]


def test_the_guest_is_told_the_clock_in_software_only() -> None:
    assert "tsc_early_khz=2596000 tsc=reliable" in qemu_command.kernel_command_line(TCG)
    assert "tsc_early_khz" not in qemu_command.kernel_command_line(Cpu("kvm", 0))


def test_device_state_loads_with_these_options() -> None:
    argv = command()
    assert "suppress-vmdesc=on" in after(argv, "-M")[0]
    assert after(argv, "-global") == ["migration.send-configuration=off"]
    assert qemu_command.restore_arguments() == ["-incoming", "defer"]


@pytest.mark.parametrize("internet", [True, False])
def test_the_network_is_closed_unless_asked(internet: bool) -> None:
    (network,) = after(command(internet=internet), "-netdev")
    assert json.loads(network)["restrict"] is not internet
    assert json.loads(network)["hostfwd"] == [{"str": "tcp:127.0.0.1:0-10.0.2.15:49983"}]


def test_the_cpu_fits_the_mode() -> None:
    assert after(command(), "-cpu") == ["max"]
    assert after(command(cpu=Cpu("kvm", 0)), "-cpu") == ["host"]


def test_the_console_is_text_only() -> None:
    raw = b"a\x1b[31mred\x1b[0m\r\nb\x07\x00\x9b\xff\tc\x1b]0;title\x07"
    cleaned = clean_console(raw)
    assert cleaned.startswith("ared\nb")
    assert all(character.isprintable() or character in "\n\t" for character in cleaned)
