"""``--events github``: a group of lines for each step, annotations at the recipe's lines, and a job summary.

What a guest or a recipe wrote must not command the runner: such text is made harmless, and while a step's output
is shown the runner is told to obey nothing but a token that nobody in the sandbox can know.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TypeAlias

from aenv_build.reports import events
from aenv_build.reports.github_summary import summary
from aenv_build.reports.progress import PlainLines
from aenv_build.reports.record import Recorder
from aenv_build.reports.workflow_commands import command, harmless

#: Lines kept of a step that waits for its turn to be shown.
MAX_HELD = 5000
MAX_ANNOTATION = 4000
#: Of one job step, as GitHub takes it.
MAX_SUMMARY_BYTES = 1 << 20
#: A step: its cell, if there is a matrix, and its id.
Key: TypeAlias = tuple[str | None, str]


class GithubLines:
    """A sink for the log of a job. Steps that run at once are shown one after another, each in its group.

    The first one streams; what the others write is held until it is done.
    """

    def __init__(
        self,
        stream: IO[str],
        environment: Mapping[str, str],
        *,
        explain: bool = False,
        token: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._stream = stream
        self._plain = PlainLines(stream, explain=explain)
        self._workspace = environment.get("GITHUB_WORKSPACE", "")
        self._summary = environment.get("GITHUB_STEP_SUMMARY", "")
        self._recorder = Recorder()
        self._new_token = token
        self._shown: Key | None = None
        self._token = ""
        self._held: dict[Key, deque[str]] = {}
        self._loose: list[str] = []
        self._titles: dict[Key, str] = {}

    def __call__(self, event: events.BuildEvent) -> None:
        """Show it."""
        self._recorder(event)
        lines = self._plain.lines(event)
        match event:
            case events.StageStarted():
                key = (event.cell, event.step)
                cell = f"{event.cell}: " if event.cell else ""
                self._titles[key] = f"{cell}{event.step}: {event.what}"
                self._held[key] = deque(maxlen=MAX_HELD)
                self._lines(key, lines)
                if self._shown is None:
                    self._open(key)
            case events.StageOutput() | events.StageNote() | events.StageRetried():
                self._lines((event.cell, event.step), lines)
            case events.StageFinished() | events.StageFailed():
                self._lines((event.cell, event.step), lines)
                self._end((event.cell, event.step))
            case events.BuildFailed():
                self._fail(event)
            case _:
                self._lines(None, lines)
        if isinstance(event, events.BuildFinished | events.BuildFailed) and event.cell is None:
            self._append_summary()
        self._stream.flush()

    def _lines(self, step: Key | None, lines: list[str]) -> None:
        """To the log, or held while another step is shown."""
        if step in self._held and step != self._shown:
            self._held[step].extend(lines)
        elif step == self._shown or self._shown is None:
            self._print(*map(harmless, lines))
        else:  # of no group, such as a step that was in the cache
            self._loose += lines

    def _open(self, step: Key) -> None:
        self._token = self._new_token()
        self._print(command("group", harmless(self._titles[step])), command("stop-commands", self._token))
        self._shown = step
        held = self._held[step]
        self._print(*map(harmless, held))
        held.clear()

    def _close(self) -> None:
        self._print(command(self._token, ""), command("endgroup", ""))
        self._print(*map(harmless, self._loose))
        self._loose.clear()
        self._shown = None

    def _end(self, step: Key) -> None:
        """A step is done: its group closes, and so do those of steps that were done meanwhile."""
        if step != self._shown:
            self._titles[step] += " (ran beside the one before)"
            return
        self._close()
        del self._held[step]
        for other in list(self._held):
            self._open(other)
            if self._recorder.is_running(*other):
                return
            self._close()
            del self._held[other]

    def _fail(self, event: events.BuildFailed) -> None:
        """Close what is open, show what is held, then the annotation."""
        if self._shown is not None:
            self._close()
        for step, lines in self._held.items():
            if lines:
                self._open(step)
                self._close()
        self._held.clear()
        self._print(self.annotation(event))

    def annotation(self, event: events.BuildFailed) -> str:
        """``::error`` at the recipe's line, where it is known."""
        properties = {}
        if event.place is not None:
            properties = {
                "file": _below(self._workspace, event.place.file),
                "line": str(event.place.line),
                "col": str(event.place.column),
            }
        message = event.message if not event.fix else f"{event.message}\nfix: {event.fix}"
        return command(
            "error", harmless(message)[:MAX_ANNOTATION], **properties, title=f"aenv-build: {event.code}"
        )

    def _append_summary(self) -> None:
        if not self._summary:
            return
        data = summary(self._recorder).encode()
        if len(data) > MAX_SUMMARY_BYTES:
            data = b"The summary of this build is too long to be shown here; its log has all of it.\n"
        with Path(self._summary).open("ab") as file:
            file.write(data)

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._stream.write(line + "\n")


def _below(workspace: str, file: str) -> str:
    """The path as the repository knows it, if it is in there."""
    if not workspace:
        return file
    relative = os.path.relpath(os.path.abspath(file), os.path.abspath(workspace))  # noqa: PTH100
    return file if relative.startswith("..") else relative
