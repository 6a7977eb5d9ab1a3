"""Bases in a plan: what each is, and what counts of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aenv_build.bases.image import ResolvedImage
from aenv_build.language.document import Where
from aenv_build.language.load import Source
from aenv_build.language.recipe import Base
from aenv_build.planning.files import Readings
from aenv_build.planning.keys import HostFacts, Inputs, fields, inputs
from aenv_run.errors import Unsupported
from aenv_run.snapshot import Snapshot
from aenv_run.types import Context, Digest, MachineSpec, SnapshotId, StageKey


@dataclass(frozen=True)
class BaseStage:
    """A root of the graph. ``snapshot`` is set when the base is one, and nothing has to be built.

    ``labels`` are those that outputs have of it.
    """

    inputs: Inputs
    context: Context
    snapshot: SnapshotId | None = None
    depth: int = 1
    image: ResolvedImage | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    release: Digest | None = None

    @property
    def key(self) -> StageKey:
        """The digest of all inputs."""
        return self.inputs.key


@dataclass(frozen=True)
class FoundBase:
    """What a base means today. ``release``: the state of a package archive that the recipe is locked to."""

    snapshot: Snapshot | None = None
    image: ResolvedImage | None = None
    release: Digest | None = None


@dataclass(frozen=True)
class Bases:
    """Makes the root stages of one recipe."""

    source: Source
    facts: HostFacts
    machine: MachineSpec
    readings: Readings

    def stage(self, base: Base, where: Where, found: FoundBase) -> BaseStage:
        """The stage of the base that stands there."""
        source, snapshot, image = self.source, found.snapshot, found.image
        context = snapshot.context if snapshot else image.context if image else Context()
        context = context.model_copy(update={"env": {**context.env, **source.recipe.env}})
        if snapshot is not None:
            if snapshot.machine.disk_mib != self.machine.disk_mib:
                raise Unsupported(
                    f"{source.document.mark(where)}: the snapshot's disk has {snapshot.machine.disk_mib} MiB, "
                    f"and the machine's {self.machine.disk_mib} MiB; a disk cannot change its size",
                    fix="give the recipe's machine that disk, or build the base again with this one",
                )
            named = inputs("base/snapshot", 1, snapshot=snapshot.id)
            return BaseStage(named, context, snapshot.id, len(snapshot.disk))
        common: dict[str, object] = {"architecture": self.facts.architecture, "disk_mib": self.machine.disk_mib}
        if image is not None:
            # The name does not count: a tag that moved is another image, another name of this one is not.
            named = inputs("base/image", 1, **common, manifest=image.manifest_digest)
            return BaseStage(named, context, image=image, labels=image.labels)
        if base.empty is not None:
            return BaseStage(inputs("base/empty", 1, **common), context)
        if base.debootstrap is not None:
            values = fields(base.debootstrap)
            values["packages"] = sorted(set(base.debootstrap.packages))
            if found.release is not None:  # without a lock, the key is that of before there were any
                values["release"] = found.release
            return BaseStage(inputs("base/debootstrap", 1, **common, **values), context, release=found.release)
        assert base.archive is not None
        path = source.folder / base.archive
        if not path.is_file():
            raise source.error(
                (*where, "archive"),
                f"no such file: {base.archive}",
                fix=f"the path is relative to the recipe's folder, {source.folder}",
            )
        return BaseStage(inputs("base/archive", 1, **common, content=self.readings.digest(path)), context)
