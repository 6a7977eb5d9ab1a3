"""The state table: complete, consistent, and the same as the one that docs/lifecycle.md prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_run.errors import Conflict, SandboxDead
from aenv_run.lifecycle import AFTER_CRASH, LIVE, TABLE, Operation, State, as_markdown, transition

DOCUMENT = Path(__file__).parents[2] / "docs" / "lifecycle.md"


def test_no_two_rows_for_one_case() -> None:
    cases = [(row.operation, row.source) for row in TABLE]
    assert len(cases) == len(set(cases))


def test_every_operation_has_a_row() -> None:
    assert {row.operation for row in TABLE} == set(Operation)


def test_every_state_can_be_killed() -> None:
    for state in State:
        assert transition(Operation.KILL, state).success is None


def test_a_failed_operation_gives_back_the_state_before() -> None:
    for row in TABLE:
        if row.operation in (Operation.PAUSE, Operation.RESUME, Operation.FORK, Operation.SNAPSHOT):
            assert row.failure is row.source


def test_what_is_written_to_disk_is_known_to_the_next_node() -> None:
    lasting = {row.success for row in TABLE} | {State.STARTING}
    assert lasting - {None} == set(AFTER_CRASH)


@pytest.mark.parametrize("state", sorted(LIVE | {State.PAUSED}))
def test_what_is_not_in_the_table_is_a_conflict(state: State) -> None:
    for operation in Operation:
        if (operation, state) not in [(row.operation, row.source) for row in TABLE]:
            with pytest.raises(Conflict, match=state.value):
                transition(operation, state)


def test_a_dead_sandbox_is_an_error_of_its_own_type() -> None:
    with pytest.raises(SandboxDead, match="out of memory") as caught:
        transition(Operation.PAUSE, State.DEAD, reason="out of memory")
    assert caught.value.fix


def test_the_document_shows_the_table() -> None:
    assert as_markdown() in DOCUMENT.read_text(), "docs/lifecycle.md: paste the output of lifecycle.as_markdown()"
