"""A sink for build events on a terminal: a live tree."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from aenv_build.reports import events
from aenv_build.reports.progress import PlainLines
from aenv_build.reports.wording import seconds

TREE_LINES = 4


class LiveTree:
    """Running stages with their time and last lines, kept in place; finished ones scroll above. Use ``with``."""

    def __init__(self, console: Console, *, explain: bool = False) -> None:
        self._console = console
        self._plain = PlainLines(console.file, explain=explain)
        self._running: dict[tuple[str | None, str], _Running] = {}
        self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.clear()
        self._live.__exit__(kind, error, trace)

    def __call__(self, event: events.BuildEvent) -> None:
        """Show it."""
        if isinstance(event, events.StageStarted):
            self._running[event.cell, event.step] = _Running(self._plain.lines(event)[0])
        elif isinstance(event, events.StageOutput):
            if running := self._running.get((event.cell, event.step)):
                running.lines = [*running.lines, event.text][-TREE_LINES:]
        else:
            if isinstance(event, events.StageFinished | events.StageFailed):
                self._running.pop((event.cell, event.step), None)
            style = "red" if isinstance(event, events.StageFailed) else ""
            for line in self._plain.lines(event):
                self._console.print(Text(line, style=style))

    def _render(self) -> Group:
        rows: list[Spinner | Text] = []
        for running in self._running.values():
            spent_ms = round((time.monotonic() - running.began) * 1000)
            rows.append(Spinner("dots", Text(f"{running.head} {seconds(spent_ms)}", style="bold")))
            rows += [
                Text(f"    │ {line}", style="dim", no_wrap=True, overflow="ellipsis") for line in running.lines
            ]
        return Group(*rows)


class _Running:
    def __init__(self, head: str) -> None:
        self.head = head
        self.began = time.monotonic()
        self.lines: list[str] = []
