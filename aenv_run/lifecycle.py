"""The life of a sandbox as data: its states, its operations, and what each leads to.

``TABLE`` is the only place that says which operation is allowed when. docs/lifecycle.md prints the same table
and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from aenv_run.errors import AenvError, Conflict, SandboxDead, TimeOver


class State(StrEnum):
    """What a sandbox is doing."""

    STARTING = "starting"
    RUNNING = "running"
    FORKING = "forking"
    SNAPSHOTTING = "snapshotting"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    DEAD = "dead"


class Operation(StrEnum):
    """What can happen to a sandbox: asked for by a caller, or (``DIE``) by its engine."""

    CREATE = "create"
    PAUSE = "pause"
    RESUME = "resume"
    FORK = "fork"
    SNAPSHOT = "snapshot"
    KILL = "kill"
    DIE = "die"


#: States in which the sandbox has, or is about to have, a machine.
LIVE = frozenset(State) - {State.PAUSED, State.DEAD}


@dataclass(frozen=True)
class Transition:
    """One row: from ``source``, ``operation`` shows as ``during`` and ends as ``success`` or ``failure``.

    None as a source means that the sandbox does not exist yet; as an end, that it and its directory are gone.
    """

    operation: Operation
    source: State | None
    during: State | None
    success: State | None
    failure: State | None


TABLE: tuple[Transition, ...] = (
    Transition(Operation.CREATE, None, State.STARTING, State.RUNNING, None),
    Transition(Operation.PAUSE, State.RUNNING, State.PAUSING, State.PAUSED, State.RUNNING),
    Transition(Operation.RESUME, State.PAUSED, State.RESUMING, State.RUNNING, State.PAUSED),
    Transition(Operation.FORK, State.RUNNING, State.FORKING, State.RUNNING, State.RUNNING),
    Transition(Operation.SNAPSHOT, State.RUNNING, State.SNAPSHOTTING, State.RUNNING, State.RUNNING),
    *(Transition(Operation.KILL, state, None, None, None) for state in State),
    *(
        Transition(Operation.DIE, state, None, State.DEAD, State.DEAD)
        for state in State
        if state in LIVE and state not in (State.STARTING, State.RESUMING)
    ),
)

#: The states that ``sandbox.json`` may hold, each with what a node that starts makes of it: if the machine still
#: lives, and if it does not. The passing states live in the node's memory only: a node that dies half-way in
#: one leaves the state before it. None: the sandbox was never handed out, so it is removed.
AFTER_CRASH: dict[State, tuple[State | None, State | None]] = {
    State.STARTING: (None, None),
    State.RUNNING: (State.RUNNING, State.DEAD),
    State.PAUSED: (State.PAUSED, State.PAUSED),
    State.DEAD: (State.DEAD, State.DEAD),
}

_ROWS = {(row.operation, row.source): row for row in TABLE}


def transition(
    operation: Operation, state: State | None, *, subject: str = "sandbox", reason: str = "", ended_by: str = ""
) -> Transition:
    """The row for ``operation`` in ``state``.

    Raises ``SandboxDead`` for a dead sandbox and ``Conflict`` for any other state that forbids the operation.
    """
    if row := _ROWS.get((operation, state)):
        return row
    raise refusal(operation.value, state, subject=subject, reason=reason, ended_by=ended_by)


def refusal(
    what: str, state: State | None, *, subject: str = "sandbox", reason: str = "", ended_by: str = ""
) -> AenvError:
    """The error for doing ``what`` (an operation, or using the guest) in a state that does not allow it."""
    if state is State.DEAD and ended_by == "time_over":
        return TimeOver(
            f"{subject} has ended: {reason}", fix="start a new one, with more seconds if it needs them"
        )
    if state is State.DEAD:
        return SandboxDead(
            f"{subject} is dead{f': {reason}' if reason else ''}",
            fix="start a new one; `aenv rm` removes this one",
        )
    fixes = {
        State.PAUSED: "resume it first (`aenv resume`)",
        State.RUNNING: "it is running already; nothing to do" if what == Operation.RESUME.value else "",
    }
    if state is State.PAUSED and what == Operation.PAUSE.value:
        fixes = {State.PAUSED: "it is paused already; nothing to do"}
    return Conflict(
        f"cannot {what} {subject}: it is {state.value if state else 'not there'}",
        fix=fixes.get(state, "wait until it is running or paused") if state else "",
    )


def as_markdown() -> str:
    """The table of docs/lifecycle.md."""

    def cell(state: State | None, absent: str) -> str:
        return state.value if state else absent

    lines = ["| Operation | From | Shown meanwhile | If it works | If it fails |", "|---|---|---|---|---|"]
    for row in TABLE:
        source, during = cell(row.source, "-"), cell(row.during, "-")
        success, failure = cell(row.success, "removed"), cell(row.failure, "removed")
        lines.append(f"| {row.operation.value} | {source} | {during} | {success} | {failure} |")
    lines += ["", "| Left behind as | Machine lives | Machine gone |", "|---|---|---|"]
    for state, (alive, gone) in AFTER_CRASH.items():
        lines.append(f"| {state.value} | {cell(alive, 'removed')} | {cell(gone, 'removed')} |")
    return "\n".join(lines) + "\n"
