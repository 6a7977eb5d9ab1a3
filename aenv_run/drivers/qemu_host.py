"""What of this host QEMU depends on: its version, /dev/kvm, the clock; found by trying, remembered per boot."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from aenv_run import process
from aenv_run.drivers import kvm_probe
from aenv_run.drivers.guest_image import FIX, GuestFiles
from aenv_run.drivers.protocol import DriverName, Probe, Requirement
from aenv_run.errors import AenvError, CommandTimeout, MissingDependency
from aenv_run.paths import Home
from aenv_run.types import Architecture

PROGRAM = "qemu-system-x86_64"
PACKAGES = "apt install qemu-system-x86 qemu-utils (on Debian 12 with -t bookworm-backports: 10 is needed)"
#: Below this `rom=off` of memory-backend-file is missing (7.2) or nothing was measured.
MIN_VERSION = (10, 0)


def architecture() -> Architecture:
    """Of this host, in Debian's words."""
    return Architecture("arm64" if platform.machine() in ("aarch64", "arm64") else "amd64")


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def remembered(home: Home, name: str, key: str, find: Callable[[], Awaitable[str]]) -> str:
    """``find()``'s answer, kept in the home's cache until the host boots again or ``key`` changes."""
    path = home.cache / "host" / f"{name}.json"
    key = f"{_boot_id()}:{key}"
    try:
        kept = json.loads(path.read_bytes())
        if kept["key"] == key:
            return str(kept["value"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there yet, or damaged: found again
    value = await find()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{hashlib.sha256(f'{id(find)}{value}'.encode()).hexdigest()[:8]}")
    temporary.write_text(json.dumps({"key": key, "value": value}))
    temporary.rename(path)
    return value


def qemu_path() -> Path:
    """The QEMU program; MissingDependency when there is none."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise MissingDependency(f"{PROGRAM} is not installed", fix=PACKAGES)
    return Path(found)


async def qemu_version(home: Home) -> str:
    """As QEMU prints it, with the distribution's package: ``10.0.2 (Debian 1:10.0.2+ds-2)``."""
    path = qemu_path()
    facts = path.stat()

    async def find() -> str:
        done = await process.check([str(path), "--version"], what="cannot ask QEMU's version", timeout_s=20.0)
        match = re.search(r"version (.+)", done.stdout.decode(errors="replace"))
        if not match:
            raise MissingDependency(f"{path} does not say its version", fix=PACKAGES)
        return match.group(1).strip()

    return await remembered(home, "qemu-version", f"{path}:{facts.st_size}:{facts.st_mtime_ns}", find)


def version_numbers(text: str) -> tuple[int, int]:
    """``(10, 0)`` of ``10.0.2 (Debian …)``."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def parse_tsc_khz(kernel_log: str, cpuinfo: str) -> int:
    """The host's TSC frequency, to whole MHz: the kernel's own refinement moves it by some kHz.

    0 when neither text has it.
    """
    # The later line is the better one: "Refined" comes after "Detected".
    found = re.findall(r"tsc: (?:Refined TSC clocksource calibration:|Detected) ([\d.]+) MHz", kernel_log)
    found = found or re.findall(r"^cpu MHz\s*: ([\d.]+)", cpuinfo, re.MULTILINE)
    return round(float(found[-1])) * 1000 if found else 0


async def tsc_khz(home: Home) -> int:
    """See ``parse_tsc_khz``; the first answer since boot is kept, so that all processes agree."""

    async def find() -> str:
        try:
            log = (await process.run(["dmesg"], timeout_s=5.0)).stdout.decode(errors="replace")
        except (MissingDependency, CommandTimeout):
            log = ""  # dmesg may also be forbidden: it then prints nothing
        return str(parse_tsc_khz(log, Path("/proc/cpuinfo").read_text()))

    return int(await remembered(home, "tsc-khz", "1", find))


async def kvm_verdict(home: Home) -> tuple[str, str]:
    """``native``, ``pvm``, ``emulated`` or ``none``, and the detail behind it."""

    async def find() -> str:
        try:
            done = await process.run([sys.executable, "-I", kvm_probe.__file__], timeout_s=3.0)
        except CommandTimeout:
            return json.dumps({"verdict": "emulated", "detail": "a test guest did not end in 3 s"})
        if done.exit_code != 0:
            return json.dumps({"verdict": "none", "detail": f"the test guest failed (exit code {done.exit_code})"})
        return done.stdout.decode()

    device = Path("/dev/kvm")
    facts = f"{device.stat().st_mode}" if device.exists() else "absent"
    answer = json.loads(await remembered(home, "kvm", facts, find))
    return str(answer["verdict"]), str(answer["detail"])


def explain_mode(verdict: str, detail: str, pvm_host: bool) -> tuple[str, str]:
    """QEMU's mode and one sentence why."""
    if verdict == "native":
        return "kvm", f"/dev/kvm runs guests at native speed ({detail})"
    if verdict == "pvm":
        return "tcg", "/dev/kvm runs only PVM-aware guest kernels (host is PVM): software emulation"
    if verdict == "emulated":
        host = "the host is PVM; " if pvm_host else ""
        return "tcg", (
            f"/dev/kvm opens but a test guest did not run at native speed ({host}{detail}): software emulation"
        )
    return "tcg", f"no usable /dev/kvm ({detail}): software emulation"


async def mode(home: Home) -> tuple[str, str]:
    """How QEMU runs guests here: ``kvm`` or ``tcg``, and why."""
    verdict, detail = await kvm_verdict(home)
    return explain_mode(verdict, detail, Path("/sys/module/kvm_pvm").is_dir())


def host_cpu() -> str:
    """Names the CPU that ``-cpu host`` shows to guests: model and a digest of its features."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.+)", text, re.MULTILINE)
    features = " ".join(sorted(flags.group(1).split())) if flags else ""
    digest = hashlib.sha256(features.encode()).hexdigest()[:16]
    return f"host:{model.group(1).strip() if model else 'unknown'}:{digest}"


def ram_library(home: Home) -> Path | None:
    """The library that is preloaded into QEMU to map RAM in layers; None where it was not built."""
    path = home.guest() / f"ram-{architecture()}.so"
    return path if path.is_file() else None


def _program(name: str, fix: str) -> Requirement:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    return Requirement(name, found is not None, found or "not installed", "" if found else fix)


async def requirements(home: Home) -> tuple[Requirement, ...]:
    """Everything that QEMU needs of the host."""
    items = [_program(PROGRAM, PACKAGES)]
    if items[0].present:
        try:
            version = await qemu_version(home)
            enough = version_numbers(version) >= MIN_VERSION
            items.append(Requirement("QEMU 10 or later", enough, version, "" if enough else PACKAGES))
        except AenvError as error:
            items.append(Requirement("QEMU 10 or later", False, error.message, PACKAGES))
    items += [
        _program("qemu-img", "apt install qemu-utils"),
        _program("mke2fs", "apt install e2fsprogs"),
        _program("setpriv", "apt install util-linux"),
    ]
    amd64 = architecture() == "amd64"
    items.append(Requirement("x86-64 host", amd64, platform.machine(), "" if amd64 else "use an x86-64 machine"))
    try:
        files = GuestFiles.find(home, architecture())
        library = "" if ram_library(home) else "; without ram-*.so memory layers are copied at each start"
        items.append(
            Requirement("guest kernel and daemon", True, f"{files.kernel.parent.parent}, {files.release}{library}")
        )
    except AenvError as error:
        items.append(Requirement("guest kernel and daemon", False, error.message, FIX))
    return tuple(items)


async def probe(home: Home) -> Probe:
    """Whether QEMU works here, and in which mode."""
    needs = await requirements(home)
    missing = [one for one in needs if not one.present]
    if missing:
        why = "; ".join(f"{one.name}: {one.detail}" for one in missing)
        return Probe(DriverName.QEMU, False, "none", why, needs)
    found, why = await mode(home)
    return Probe(DriverName.QEMU, True, found, why, needs)
