"""Bases: each makes a directory tree, from which one disk image is made."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from aenv_build.bases.archive import unpack_archive
from aenv_build.bases.debootstrap import bootstrap
from aenv_build.plan import Plan
from aenv_run import disk
from aenv_run.types import Architecture

__all__ = ["make_base_disk"]


async def make_base_disk(plan: Plan, architecture: Architecture, directory: Path) -> Path:
    """Make the base's disk image in ``directory``, which is left with nothing but it."""
    base = plan.source.recipe.base
    tree, image = directory / "tree", directory / "base.qcow2"
    try:
        if base.debootstrap is not None:
            archive = directory / "base.tar"
            await bootstrap(base.debootstrap, architecture, archive)
        else:
            assert base.archive is not None
            archive = plan.source.folder / base.archive
        await unpack_archive(archive, tree, disk_mib=plan.machine.disk_mib)
        if base.debootstrap is not None:
            archive.unlink()
        await disk.make_image(tree, plan.machine.disk_mib, image)
    finally:
        await asyncio.to_thread(shutil.rmtree, tree, True)
    return image
