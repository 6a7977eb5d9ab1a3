"""Templates as the catalog and the records of builds have them. Blocking."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aenv_run.api.references import catalog_reference
from aenv_run.api.templates.records import Build, Records
from aenv_run.api.wire.model import moment
from aenv_run.api.wire.snapshots import SANDBOX_LABEL
from aenv_run.api.wire.templates import Template, TemplateBuild, TemplateWithBuilds
from aenv_run.catalog import Catalog, Entry
from aenv_run.errors import NotFound
from aenv_run.types import MachineSpec, Name

_VERSIONS = uuid.UUID("8c1f5a52-6ad4-5c55-9f4b-0b1a0b3e6a10")


@dataclass
class Known:
    """All that is known of one name: its versions and the builds of it, newest first."""

    name: Name
    entries: list[Entry] = field(default_factory=list)
    builds: list[Build] = field(default_factory=list)


@dataclass(frozen=True)
class Templates:
    """Reads both."""

    catalog: Catalog
    records: Records

    def all(self) -> list[Known]:
        """By name; every name that has a version that is no snapshot of a sandbox, or a build."""
        found: dict[Name, Known] = {}
        for entry in self.catalog.all.fixed():
            if entry.version is not None and SANDBOX_LABEL not in entry.labels:
                found.setdefault(entry.name, Known(entry.name)).entries.append(entry)
        for build in self.records.all():
            found.setdefault(build.template, Known(build.template)).builds.append(build)
        return [found[name] for name in sorted(found)]

    def find(self, written: str) -> Known:
        """One, by its name or any reference to it; ``NotFound`` says that it is not there."""
        alias = catalog_reference(written).alias
        missing = NotFound(f"template {written[:80]!r} not found")
        if alias is None:
            raise missing
        name = Name(alias)
        known = Known(name, builds=[build for build in self.records.all() if build.template == name])
        with contextlib.suppress(NotFound):
            entries = self.catalog.entries(name)
            known.entries = [one for one in entries if one.version is not None and SANDBOX_LABEL not in one.labels]
        if not known.entries and not known.builds:
            raise missing
        return known

    def row(self, known: Known) -> Template:
        """As the list shows it."""
        return Template.model_validate(self._fields(known))

    def detail(self, known: Known, builds: Iterable[TemplateBuild]) -> TemplateWithBuilds:
        """As it is shown alone, with a page of its builds."""
        return TemplateWithBuilds.model_validate({**self._fields(known), "builds": tuple(builds)})

    def builds(self, known: Known) -> list[TemplateBuild]:
        """Newest first; of a version that was built elsewhere what the catalog says of it."""
        found = [_of_record(build) for build in known.builds]
        recorded = {build.version for build in known.builds}
        for entry in known.entries:
            if entry.version not in recorded:
                found.append(self._of_entry(entry))
        return sorted(found, key=lambda build: (build.created_at, build.build_id), reverse=True)

    def build_id(self, known: Known, version: int) -> str:
        """Of a version: its build's, or one that is always the same for that version."""
        made = next((build for build in known.builds if build.version == version), None)
        return made.build_id if made is not None else str(uuid.uuid5(_VERSIONS, f"{known.name}:{version}"))

    def tags(self, known: Known) -> list[tuple[str, str, datetime]]:
        """Each tag with the build that it is at, and since when."""
        rows = []
        for entry in known.entries:
            for tag in entry.tags:
                moved = next(iter(self.catalog.tag_log.moves(known.name, tag)), None)
                since = moment(moved.at if moved is not None else entry.created_at)
                rows.append((str(tag), self.build_id(known, entry.version or 0), since))
        return sorted(rows)

    def _machine(self, known: Known) -> MachineSpec:
        for entry in reversed(known.entries):
            if entry.machine is not None:
                return entry.machine
        if known.builds:
            return _machine_of(known.builds[0])
        return MachineSpec()

    def _of_entry(self, entry: Entry) -> TemplateBuild:
        machine = self._machine(Known(entry.name, [entry]))
        at = moment(entry.created_at)
        return TemplateBuild(
            build_id=self.build_id(Known(entry.name), entry.version or 0), status="ready", created_at=at,
            updated_at=at, finished_at=at, cpu_count=machine.cpus, memory_mb=machine.memory_mib,
            disk_size_mb=machine.disk_mib,
        )  # fmt: skip

    def _fields(self, known: Known) -> dict[str, object]:
        builds, machine = self.builds(known), self._machine(known)
        newest = builds[0]
        return {
            "template_id": str(known.name), "build_id": newest.build_id, "cpu_count": machine.cpus,
            "memory_mb": machine.memory_mib, "disk_size_mb": machine.disk_mib, "aliases": (str(known.name),),
            "names": (str(known.name),), "created_at": builds[-1].created_at,
            "updated_at": max(build.updated_at for build in builds), "build_count": len(builds),
            "build_status": newest.status,
        }  # fmt: skip


def _at(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)


def _machine_of(build: Build) -> MachineSpec:
    return MachineSpec(cpus=build.cpus, memory_mib=build.memory_mib, disk_mib=build.disk_mib)


def _of_record(build: Build) -> TemplateBuild:
    return TemplateBuild(
        build_id=build.build_id, status=build.status, created_at=_at(build.created_at_s),
        updated_at=_at(build.updated_at_s), cpu_count=build.cpus, memory_mb=build.memory_mib,
        disk_size_mb=build.disk_mib, finished_at=None if build.finished_at_s is None else _at(build.finished_at_s),
    )  # fmt: skip
