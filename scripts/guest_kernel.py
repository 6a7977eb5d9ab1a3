"""Unpack a guest kernel from the distribution's cloud kernel package, without installing it.

    python3 scripts/guest_kernel.py build/guest/kernel

Writes ``vmlinuz``, ``modules/NNN-name.ko`` (uncompressed, in load order) and ``kernel.json``. Needs apt
with package lists and dpkg-deb. Standard library only. The Ubuntu branch has not been run.
"""

from __future__ import annotations

import json
import lzma
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

WANTED = ("virtio_mmio", "virtio_blk", "virtio_net", "virtio_balloon", "overlay", "erofs")

# The first meta package that exists names the kernel. Debian 12's own kernel is 6.1: its 6.12 is in the
# security suite or, without that, in backports. Later releases have one cloud kernel.
META_PACKAGES = {
    "bookworm": ("linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64/bookworm-backports"),
    "debian": ("linux-image-cloud-amd64",),
    "ubuntu": ("linux-image-virtual",),
}


class SetupError(Exception):
    """What failed, why, and what to do."""


@dataclass(frozen=True)
class Package:
    """One exact version of a binary package."""

    name: str
    version: str
    depends: str


def run(*command: str, cwd: Path | None = None) -> str:
    """Standard output of ``command``; SetupError with its last words when it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def meta_packages() -> tuple[str, ...]:
    """The candidates for this distribution."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    names = [release.get(key, "").strip('"') for key in ("VERSION_CODENAME", "ID")]
    for name in names:
        if name in META_PACKAGES:
            return META_PACKAGES[name]
    raise SetupError(
        f"no guest kernel package is known for {names[1] or 'this system'}. Put vmlinuz, modules/ and "
        "kernel.json of a kernel with virtio into a directory 'kernel' and name its parent in AENV_GUEST_DIR"
    )


def show(name: str) -> Package | None:
    """The candidate version of ``name`` (or ``name/suite``), or None when the lists do not have it."""
    name, _, suite = name.partition("/")
    options = ["-o", f"APT::Default-Release={suite}"] if suite else []
    done = subprocess.run(
        ["apt-cache", *options, "show", "--no-all-versions", name],
        capture_output=True,
        text=True,
        check=False,
    )
    fields = dict(re.findall(r"^(Package|Version|Depends): (.*)$", done.stdout, re.MULTILINE))
    if "Version" not in fields:
        return None
    return Package(name, fields["Version"], fields.get("Depends", ""))


def kernel_packages() -> list[Package]:
    """The kernel image package, and the package of its modules where that is separate (Ubuntu)."""
    candidates = meta_packages()
    meta = next((found for name in candidates if (found := show(name))), None)
    if meta is None:
        raise SetupError(f"apt knows none of {', '.join(candidates)}: run apt-get update and try again")
    image = re.search(r"linux-image-(?:unsigned-)?\d[\w.+-]*", meta.depends)
    found = show(image.group()) if image else None
    if found is None:
        raise SetupError(f"{meta.name} {meta.version} names no kernel image known to apt: {meta.depends}")
    modules = re.search(r"linux-modules-\d[\w.+-]*", found.depends)
    extra = show(modules.group()) if modules else None
    return [found, extra] if extra else [found]


def unpack(packages: list[Package], into: Path) -> None:
    """Download and unpack ``packages`` below ``into``."""
    for package in packages:
        # The sandbox user could not write into a private directory.
        run(
            *("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3"),
            *("download", f"{package.name}={package.version}"),
            cwd=into,
        )
    for archive in sorted(into.glob("*.deb")):
        run("dpkg-deb", "--extract", str(archive), str(into))


def module_name(path: Path) -> str:
    """``virtio_net`` of ``…/virtio-net.ko.xz``: the kernel takes - and _ as equal."""
    return path.name.partition(".ko")[0].replace("-", "_")


def read_module(path: Path) -> bytes:
    """The module, uncompressed."""
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", str(path)], stdout=subprocess.PIPE, check=True).stdout
    return path.read_bytes()


def dependencies(module: bytes) -> tuple[list[str], list[str]]:
    """What must, and what should if it exists, be loaded first; packages carry no modules.dep."""

    def names(field: bytes) -> list[str]:
        values = b" ".join(re.findall(rb"\0" + field + rb"([^\0]*)", module)).decode()
        words = re.split(r"[,\s]+", values.partition("post:")[0])
        return [word.replace("-", "_") for word in words if word]

    return names(b"depends="), names(b"softdep=pre: ")


def load_order(tree: Path) -> list[tuple[str, bytes]]:
    """(name, content) of the wanted modules and all they need, each after its dependencies."""
    files = {module_name(path): path for path in sorted((tree / "kernel").rglob("*.ko*"))}
    builtin = {module_name(Path(line)) for line in (tree / "modules.builtin").read_text().splitlines()}
    ordered: dict[str, bytes] = {}

    def visit(name: str, required_by: str) -> None:
        if name in ordered or name in builtin:
            return
        if name not in files:
            raise SetupError(f"the kernel package has no module {name}, which {required_by} needs")
        content = read_module(files[name])
        hard, soft = dependencies(content)
        # A soft dependency may be an alias (crc32c) of something built in.
        for dependency in [*hard, *(one for one in soft if one in files)]:
            visit(dependency, name)
        ordered[name] = content

    for name in WANTED:
        visit(name, "the guest")
    return list(ordered.items())


def write(target: Path, packages: list[Package], unpacked: Path) -> None:
    """Write the kernel directory; kernel.json comes last and says that it is whole."""
    image = next(iter(sorted(unpacked.glob("boot/vmlinuz-*"))), None)
    if image is None:
        raise SetupError(f"{packages[0].name} {packages[0].version} has no boot/vmlinuz-*")
    release = image.name.removeprefix("vmlinuz-")
    trees = [tree for top in ("usr/lib", "lib") if (tree := unpacked / top / "modules" / release).is_dir()]
    if not trees:
        raise SetupError(f"{packages[-1].name} {packages[-1].version} has no modules of {release}")
    shutil.rmtree(target, ignore_errors=True)
    (target / "modules").mkdir(parents=True)
    shutil.copyfile(image, target / "vmlinuz")
    for number, (name, content) in enumerate(load_order(trees[0])):
        (target / "modules" / f"{number:03d}-{name}.ko").write_bytes(content)
    facts = {
        "release": release,
        "package": packages[0].name,
        "version": packages[0].version,
        "architecture": "amd64",
    }
    (target / "kernel.json").write_text(json.dumps(facts, indent=2) + "\n")


def main() -> int:
    """Entry point: one argument, the directory to write."""
    if len(sys.argv) != 2:
        sys.stderr.write(__doc__ or "")
        return 64
    try:
        if (machine := run("dpkg", "--print-architecture").strip()) != "amd64":
            raise SetupError(f"the guest kernel is for amd64 and this machine is {machine}")
        packages = kernel_packages()
        with tempfile.TemporaryDirectory(prefix="aenv-kernel-") as scratch:
            unpack(packages, Path(scratch))
            write(Path(sys.argv[1]), packages, Path(scratch))
    except SetupError as error:
        sys.stderr.write(f"guest_kernel: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
