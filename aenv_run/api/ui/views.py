"""What the pages show of a sandbox and of the catalog, as words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from aenv_run.amounts import age, duration, moment_age, size
from aenv_run.catalog import Entry
from aenv_run.lifecycle import State
from aenv_run.node_wire import SandboxInfo


@dataclass(frozen=True)
class SandboxRow:
    """One line of the list."""

    id: str
    reference: str
    state: str
    reason: str
    age: str
    ends_in: str
    cpus: int
    memory: str
    driver: str
    metadata: Mapping[str, str]


def sandbox_row(info: SandboxInfo, used_bytes: int | None) -> SandboxRow:
    """``used_bytes``: of its memory, when its daemon told; of one without a machine nothing is used."""
    limit = size(info.machine.memory_mib << 20)
    return SandboxRow(
        id=info.sandbox_id,
        reference=info.reference,
        state=info.state.value,
        reason=info.reason,
        age=age(info.created_at_s),
        ends_in=_ends_in(info),
        cpus=info.machine.cpus,
        memory=limit if used_bytes is None else f"{size(used_bytes)} of {limit}",
        driver=info.driver,
        metadata=info.metadata,
    )


def _ends_in(info: SandboxInfo) -> str:
    if info.expires_at_s is None or info.state is State.DEAD:
        return "-"
    word = "paused in " if info.on_timeout == "pause" else ""
    return word + duration(info.expires_at_s - time.time())


def sandbox_facts(info: SandboxInfo, used_bytes: int | None) -> list[tuple[str, str]]:
    """The table of one sandbox's page."""
    row = sandbox_row(info, used_bytes)
    facts = [
        ("State", f"{row.state} {row.reason}".strip()),
        ("Snapshot", f"{info.reference} ({info.snapshot_id.short})"),
        ("Driver", f"{info.driver} ({info.mode or 'no mode'}), {info.origin}"),
        ("Age", row.age),
        ("Ends in", row.ends_in),
        ("CPUs", str(row.cpus)),
        ("Memory", row.memory),
        ("Internet", "yes" if info.network.internet else "no"),
    ]
    if info.parent is not None:
        facts.append(("Forked from", info.parent))
    facts += [("Metadata", f"{key}={value}") for key, value in info.metadata.items()]
    return facts + [("Warning", warning.message) for warning in info.warnings]


@dataclass(frozen=True)
class CatalogRow:
    """One version of a name."""

    name: str
    version: str
    tags: tuple[str, ...]
    snapshot: str
    has_memory: bool
    published: str
    labels: Mapping[str, str]
    problem: str


def catalog_row(entry: Entry) -> CatalogRow:
    """A row that cannot be read says why."""
    return CatalogRow(
        name=entry.name,
        version="-" if entry.version is None else str(entry.version),
        tags=tuple(entry.tags),
        snapshot="-" if entry.snapshot_id is None else entry.snapshot_id.short,
        has_memory=entry.has_memory,
        published=moment_age(entry.created_at),
        labels=entry.labels,
        problem=entry.problem or "",
    )
