"""One small file per slot under the home, so that a node that was killed can be followed by another.

Nothing is synced to disk: after a crash of the host its namespaces are gone too.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from aenv_run.errors import InvalidInput
from aenv_run.network.addressing import SlotId, SlotKind
from aenv_run.network.answers import Answers
from aenv_run.network.policy import NetworkPolicy
from aenv_run.types import Model

log = logging.getLogger(__name__)


class SlotRecord(Model):
    """What is needed to take a slot over, or to remove it."""

    slot_id: SlotId
    kind: SlotKind
    policy: NetworkPolicy = NetworkPolicy()
    answers: Answers = Answers()


class SlotFiles:
    """The records of one home."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def _path(self, slot_id: SlotId) -> Path:
        return self.directory / f"{slot_id}.json"

    def write(self, record: SlotRecord) -> None:
        """Replace the slot's record, whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(record.slot_id)
        part = path.with_suffix(".part")
        part.write_text(record.model_dump_json())
        part.replace(path)

    def remove(self, slot_id: SlotId) -> None:
        """Forget the slot."""
        self._path(slot_id).unlink(missing_ok=True)
        self._path(slot_id).with_suffix(".part").unlink(missing_ok=True)

    def slots(self) -> dict[SlotId, SlotRecord | None]:
        """Every slot that has a record; None for one that cannot be read."""
        found: dict[SlotId, SlotRecord | None] = {}
        if not self.directory.is_dir():
            return found
        for path in self.directory.iterdir():
            try:
                slot_id = SlotId(path.stem)
            except InvalidInput:
                continue
            try:
                found[slot_id] = SlotRecord.model_validate_json(path.with_suffix(".json").read_bytes())
            except (OSError, ValidationError, InvalidInput) as error:
                log.warning("network slot %s: its record cannot be read: %s", slot_id, error)
                found[slot_id] = None
        return found
