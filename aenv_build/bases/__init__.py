"""Bases: each makes a directory tree, from which one disk image is made."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from aenv_build.bases.archive import unpack_archive
from aenv_build.bases.debootstrap import bootstrap
from aenv_build.bases.image import make_image_tree
from aenv_build.bases.release import require_release
from aenv_run import disk
from aenv_run.types import Architecture

if TYPE_CHECKING:
    from aenv_build.planning.plan import Plan, Stage

__all__ = ["make_base_disk"]


async def make_base_disk(
    plan: Plan, architecture: Architecture, directory: Path, step: Stage | None = None
) -> Path:
    """Make the disk image of the recipe's base, or of that step's, in ``directory``, and leave nothing else."""
    base, stage = plan.source.recipe.base, plan.base
    if step is not None and step.step.base is not None and step.base is not None:
        base, stage = step.step.base, step.base
    tree, image = directory / "tree", directory / "base.qcow2"
    disk_mib = plan.machine.disk_mib
    try:
        if stage.image is not None:
            await make_image_tree(stage.image, directory / "image", tree, disk_mib=disk_mib)
        elif base.empty is not None:
            tree.mkdir(mode=0o755)
        elif base.debootstrap is not None:
            if stage.release is not None:
                await require_release(base.debootstrap, stage.release)
            archive = directory / "base.tar"
            await bootstrap(base.debootstrap, architecture, archive)
            await unpack_archive(archive, tree, disk_mib=disk_mib)
            archive.unlink()
        else:
            assert base.archive is not None
            await unpack_archive(plan.source.folder / base.archive, tree, disk_mib=disk_mib)
        await disk.make_image(tree, plan.machine.disk_mib, image)
    finally:
        await asyncio.to_thread(shutil.rmtree, tree, True)
    return image
