"""Writing what refers to a snapshot, so that no collector takes it before the ref is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from aenv_run.errors import AenvError, Conflict, CorruptData, NotFound
from aenv_run.garbage.holder import Holder
from aenv_run.garbage.unheld import require_held
from aenv_run.repository import Repository
from aenv_run.types import SnapshotId

T = TypeVar("T")


def refer(repository: Repository, id: SnapshotId, write: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Write what refers to a snapshot, which then is there; ``Conflict`` when it was just collected.

    A lease names the snapshot from before it is looked at until the ref is there: whoever is killed in between
    leaves no ref to nothing. After a standstill of so long that the lease ran out, the snapshot is looked for once
    more, and where it went ``undo`` is called with what ``write`` had returned.
    """
    holder = Holder.of_ref(repository)
    try:
        holder.hold({id: ("a ref that is being written",)})
    except AenvError as error:
        require_held(repository, error, "what is to be named")
    try:
        watch = repository.gate.watch()
        snapshot = repository.snapshot(id)
        done = write()
        while not watch.quiet():
            watch.wait()
            try:
                repository.require_whole(snapshot)
            except (NotFound, CorruptData):
                undo(done)
                raise Conflict(
                    f"snapshot {id} was collected as garbage before it could be referred to", fix="make it again"
                ) from None
        return done
    finally:
        with suppress(AenvError):  # else it ends with this process
            holder.drop()
