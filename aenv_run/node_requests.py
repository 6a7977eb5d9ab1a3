"""What a request for a sandbox comes to: checked, and written down as the record of the new one."""

from __future__ import annotations

import secrets
import time
import uuid

from pydantic import ValidationError

from aenv_run.catalog import Resolved
from aenv_run.errors import InvalidInput
from aenv_run.hooks import Hooks
from aenv_run.lifecycle import State
from aenv_run.network import NetworkPolicy
from aenv_run.node_wire import CreateRequest, ResetRequest, SnapshotRequest
from aenv_run.sandbox_record import Record
from aenv_run.sandbox_tools import Chosen
from aenv_run.snapshot import Snapshot
from aenv_run.types import MachineSpec, SandboxId


def record_of(
    request: CreateRequest, resolved: Resolved, snapshot: Snapshot, chosen: Chosen, policy: NetworkPolicy
) -> Record:
    """The record of a new sandbox that has no files yet."""
    now_s = time.time()
    reference = f"{resolved.name}:{resolved.version}" if resolved.name else resolved.snapshot_id.short
    return Record(
        id=SandboxId.new(),
        snapshot_id=resolved.snapshot_id,
        base_id=resolved.snapshot_id,
        reference=reference,
        state=State.STARTING,
        driver=chosen.driver.name,
        mode=chosen.mode,
        architecture=snapshot.architecture,
        machine=machine_of(request, snapshot),
        context=snapshot.context,
        hooks=None if request.cold else snapshot.hooks,
        env=request.env,
        metadata=request.metadata,
        policy=policy,
        publish=request.publish,
        max_seconds=request.max_seconds,
        seconds_left=request.max_seconds,
        created_at_s=now_s,
        expires_at_s=now_s + request.timeout_s,
        on_timeout=request.on_timeout,
        timeout_s=request.timeout_s,
        terms=request.terms,
        cold=request.cold,
        with_hooks=request.hooks,
        access_token=secrets.token_urlsafe(32),
        machine_id=uuid.uuid4().hex,
        disk=(),
    )


def again_of(record: Record, request: ResetRequest) -> CreateRequest:
    """What the caller asked for when ``record`` was started, but its published ports, which it still has."""
    return CreateRequest(
        snapshot=record.snapshot_id,
        timeout_s=request.timeout_s,
        on_timeout=record.on_timeout,
        terms=record.terms.model_copy(update={"request": ""}),
        metadata=record.metadata,
        env=record.env,
        cold=record.cold,
        hooks=record.with_hooks,
        internet=record.policy.internet,
        allow=record.policy.allow,
        deny=record.policy.deny,
        max_seconds=record.max_seconds,
        memory_mib=record.machine.memory_mib,
        cpus=record.machine.cpus,
    )


def machine_of(request: CreateRequest, snapshot: Snapshot) -> MachineSpec:
    """The snapshot's machine, with another size if one is asked for: memory images are bound to theirs."""
    wanted = {"memory_mib": request.memory_mib, "cpus": request.cpus}
    changes = {
        name: value
        for name, value in wanted.items()
        if value is not None and value != getattr(snapshot.machine, name)
    }
    if not changes:
        return snapshot.machine
    if snapshot.memory is not None and not request.cold:
        raise InvalidInput(
            f"{' and '.join(changes)} cannot differ from the snapshot's when its memory is restored",
            fix="start it cold (`--cold`, or cold=True in Python)",
        )
    try:
        return MachineSpec.model_validate({**snapshot.machine.model_dump(), **changes})
    except ValidationError as error:
        raise InvalidInput(
            f"no such machine: {error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}"
        ) from error


def hooks_of(request: SnapshotRequest, record: Record) -> Hooks | None:
    """The hooks of a new snapshot: those asked for, else the sandbox's own. None where there is no memory."""
    own = record.hooks if request.memory else None
    on_restore, on_fork, on_pause = (own.on_restore, own.on_fork, own.on_pause) if own else ((), (), ())
    asked = Hooks.of(
        on_restore if request.on_restore is None else request.on_restore,
        on_fork if request.on_fork is None else request.on_fork,
        on_pause if request.on_pause is None else request.on_pause,
    )
    if asked is not None and not request.memory:
        raise InvalidInput(
            "hooks are for what was in memory, and a snapshot of the disk alone has none",
            fix="leave them out, or take the memory too",
        )
    return asked


def check_environment(env: dict[str, str]) -> None:
    """Refuse names that no process can have."""
    for name in env:
        if not name or "=" in name or "\0" in name + env[name]:
            raise InvalidInput(f"{name[:60]!r} is not the name of an environment variable")
