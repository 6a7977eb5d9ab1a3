"""Which versions of a name may go, by rules, and which stay and why. Bytes are freed by a later gc."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime

from pydantic import Field

from aenv_run.catalog.entries import Entry
from aenv_run.catalog.names import Catalog
from aenv_run.catalog.records import Version
from aenv_run.errors import CorruptData, InvalidInput, NotFound, Unsupported
from aenv_run.types import Model, Name, SnapshotId


class Rules(Model):
    """``newest`` always stay; of the others those go that are older than ``older_than_s``, where that is given."""

    newest: int | None = Field(None, ge=0)
    older_than_s: float | None = Field(None, ge=0)
    keep_tagged: bool = True


class Decision(Model):
    """What becomes of one version: it goes where ``kept_because`` is None."""

    name: Name
    version: Version
    snapshot_id: SnapshotId | None
    kept_because: str | None


def decide(catalog: Catalog, name: Name, rules: Rules, used: Mapping[SnapshotId, str]) -> list[Decision]:
    """Lowest version first. ``used``: snapshots that must stay, each with what uses it.

    A version that another one which stays has grown from stays too, whatever name that one has.
    """
    if rules.newest is None and rules.older_than_s is None:
        raise InvalidInput("no rule says which versions may go", fix="give --keep, --older-than or both")
    entries = [entry for entry in catalog.entries(name) if entry.version is not None]
    newest = entries[max(0, len(entries) - (rules.newest or 0)) :]
    reasons = {entry.reference: _own_reason(entry, rules, newest=entry in newest, used=used) for entry in entries}
    if all(reasons.values()):
        return [_decision(entry, reasons[entry.reference]) for entry in entries]
    below = _below(catalog, {reference for reference, reason in reasons.items() if reason is None})
    return [
        _decision(entry, reasons[entry.reference] or (below.get(entry.snapshot_id) if entry.snapshot_id else None))
        for entry in entries
    ]


def retain(catalog: Catalog, name: Name, rules: Rules, used: Mapping[SnapshotId, str]) -> list[Decision]:
    """Decide, and remove what may go, lowest version first; what was decided, and still held when it was done.

    A tag that came to a version meanwhile keeps it.
    """
    done = []
    for decision in decide(catalog, name, rules, used):
        reason = decision.kept_because
        if reason is None:
            tags = catalog.tag_log.by_version(name)[0].get(decision.version, [])
            if rules.keep_tagged and tags:
                reason = f"tagged {tags[0]}"
            else:
                catalog.remove(name, decision.version)
        done.append(decision.model_copy(update={"kept_because": reason}))
    return done


def _decision(entry: Entry, reason: str | None) -> Decision:
    assert entry.version is not None
    return Decision(name=entry.name, version=entry.version, snapshot_id=entry.snapshot_id, kept_because=reason)


def _own_reason(entry: Entry, rules: Rules, *, newest: bool, used: Mapping[SnapshotId, str]) -> str | None:
    """Why it stays, whatever becomes of the others."""
    if newest:
        return f"one of the newest {rules.newest}"
    if entry.snapshot_id is None or entry.problem is not None:
        return "it cannot be read (`aenv check` tells more)"
    if rules.older_than_s is not None and not _is_older(entry.created_at, rules.older_than_s):
        return "not old enough"
    if rules.keep_tagged and entry.tags:
        return f"tagged {', '.join(entry.tags)}"
    if (user := used.get(entry.snapshot_id)) is not None:
        return f"used by {user}"
    return None


def _is_older(moment: str, age_s: float) -> bool:
    try:
        then = datetime.fromisoformat(moment.replace("Z", "+00:00"))
    except ValueError:
        return False
    return time.time() - then.timestamp() > age_s


def _below(catalog: Catalog, going: set[str]) -> dict[SnapshotId, str]:
    """Every snapshot that a version which stays has grown from, with the name of that."""
    below: dict[SnapshotId, str] = {}
    for entry in catalog.entries():
        if entry.reference in going or entry.version is None:
            continue
        try:
            if entry.snapshot_id is None:
                raise CorruptData(entry.problem or "its ref is damaged")
            lineage = catalog.lineage(entry.snapshot_id)
        except (CorruptData, NotFound, Unsupported) as error:
            raise CorruptData(
                f"the lineage of {entry.reference} cannot be read, so nothing is removed: {error.message}",
                fix=f"`aenv check` tells more; what is lost for good: aenv catalog rm {entry.reference}",
            ) from None
        for snapshot in lineage[1:]:
            below.setdefault(snapshot.id, f"{entry.reference} grew from it")
    return below
