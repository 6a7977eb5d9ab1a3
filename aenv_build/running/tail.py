"""The output of a step: told line by line, its end kept for the error."""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass, field

from aenv_build.planning.plan import Stage
from aenv_build.reports.events import Sink, StageOutput
from aenv_build.running.redact import Redactor
from aenv_run.errors import StepFailed
from aenv_run.printable import printable_lines

LAST_LINES = 20
MAX_LINE = 4000
_STREAMS = ("stdout", "stderr")

#: What output says, in lower case -> what to do about it.
_ADVICE = (
    (
        ("could not resolve", "name resolution", "network is unreachable", "name or service not known"),
        "steps have no network unless the recipe says 'machine: {internet: true}'",
    ),
    (
        ("certificate verify failed", "certificate verification failed", "self-signed certificate", "self_signed"),
        "where a proxy makes certificates of its own, set AENV_BUILD_CA_BUNDLE to its bundle (docs/recipe.md)",
    ),
)


@dataclass
class Tail:
    """Splits output into lines, tells each to the sink and keeps the last ones for the error."""

    step: str
    sink: Sink
    redactor: Redactor = field(default_factory=Redactor)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def __post_init__(self) -> None:
        self._pending = dict.fromkeys(_STREAMS, "")
        self._redacted = {name: self.redactor.stream() for name in _STREAMS}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")(errors="replace") for name in _STREAMS}

    def feed(self, stream: str, data: bytes) -> None:
        """Bytes of stdout or stderr."""
        self._take(stream, self._redacted[stream].feed(data))

    def end(self) -> list[str]:
        """The last lines, what had no newline included."""
        for stream in _STREAMS:
            self._take(stream, self._redacted[stream].end())
            if rest := self._pending[stream]:
                self._line(rest)
            self._pending[stream] = ""
        return list(self.lines)

    def _take(self, stream: str, data: bytes) -> None:
        *lines, rest = (self._pending[stream] + self._decoders[stream].decode(data)).split("\n")
        if len(rest) > MAX_LINE:
            lines, rest = [*lines, rest], ""
        self._pending[stream] = rest
        for line in lines:
            self._line(line)

    def _line(self, line: str) -> None:
        # A guest's control characters must not reach the terminal.
        text = printable_lines(line.rstrip("\r")[:MAX_LINE])
        self.lines.append(text)
        self.sink(StageOutput(step=self.step, text=text))


def failure(stage: Stage, what: str, tail: Tail, *, by_command: bool = False) -> StepFailed:
    """The error that ends the build, with the last output."""
    lines = tail.end()
    shown = "\n".join(f"  | {line}" for line in lines) if lines else "  | (no output)"
    text = "\n".join(lines).lower()
    fix = next((fix for words, fix in _ADVICE if any(word in text for word in words)), "")
    what = tail.redactor.text(what)
    error = StepFailed(f"step {stage.id!r} ({stage.step.verb}) {what}; its last output:\n{shown}", fix=fix)
    error.by_command = by_command
    return error
