"""Which of several errors ended a build."""

from __future__ import annotations

from aenv_run.errors import AenvError, SandboxDead, StepFailed


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that people need: the failed step before what it pulled down."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            leaves.append(error)
    ranked = [e for kind in (StepFailed, SandboxDead, AenvError) for e in leaves if isinstance(e, kind)]
    return (ranked or leaves)[0]
