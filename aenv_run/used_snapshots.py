"""Which snapshots this home uses right now: by sandboxes that live or are paused, and by pools."""

from __future__ import annotations

from contextlib import suppress

from pydantic import ValidationError

from aenv_run.errors import CorruptData, NotFound
from aenv_run.lifecycle import State
from aenv_run.node_wire import PoolsFile
from aenv_run.paths import Home
from aenv_run.sandbox_record import SandboxDirectory
from aenv_run.types import SnapshotId


def used_snapshots(home: Home) -> dict[SnapshotId, str]:
    """Each with what uses it. A sandbox uses what it was started from and the newest that its state stands on.

    ``CorruptData`` when a record cannot be read: what it uses is then not known. Other homes on the same
    repository are not asked.
    """
    used: dict[SnapshotId, str] = {}
    directories = sorted(home.sandboxes.iterdir()) if home.sandboxes.is_dir() else []
    for directory in directories:
        with suppress(NotFound):  # not made yet, or just removed
            record = SandboxDirectory(directory).read()
            if record.state is not State.DEAD:
                used.setdefault(record.snapshot_id, f"the sandbox {record.id}")
                used.setdefault(record.base_id, f"the sandbox {record.id}")
    try:
        pools = PoolsFile.model_validate_json(home.pools.read_bytes()).pools
    except FileNotFoundError:
        pools = ()
    except (ValidationError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CorruptData(
            f"{home.pools} cannot be read, so it is not known which pools there are: {reason}"
        ) from None
    for pool in pools:
        used.setdefault(pool.snapshot_id, f"the pool of {pool.reference}")
    return used
