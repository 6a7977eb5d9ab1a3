"""``--junit FILE``: a build's steps and verifies as JUnit XML, as GitLab and most CI systems show it.

A cached step counts as passed (in no time, and says that it was cached): its result holds, and CI systems paint a
skipped test as one that nobody knows about. Skipped is what nothing needed, and what a failure elsewhere left
undone, branches that ran beside the failed step too. A command that failed and a verify that did not hold are
failures; a machine that died, a base that could not be made and an interrupted step are errors.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from aenv_build.reports import events
from aenv_build.reports.record import BuildRecord, Recorder, StepRecord
from aenv_run.errors import Interrupted, from_os
from aenv_run.printable import printable, printable_lines

MAX_TEXT = 64 * 1024


class JunitReport:
    """A sink that writes the report when the build has ended; ``check`` first whether it will be able to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recorder = Recorder()

    def check(self) -> None:
        """Better now than after an hour of building."""
        try:
            self._write("")
        except OSError as error:
            raise from_os(error, "cannot write the JUnit report") from error

    def __call__(self, event: events.BuildEvent) -> None:
        """Keep it; the last one of a build writes the file, whole or not at all."""
        self._recorder(event)
        if isinstance(event, events.BuildFinished | events.BuildFailed) and event.cell is None:
            self._write(report(self._recorder))

    def _write(self, text: str) -> None:
        """Empty: only try. The file's mode is as of any new file, for whoever uploads it."""
        descriptor, temporary = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                mask = os.umask(0)
                os.umask(mask)
                os.fchmod(file.fileno(), 0o666 & ~mask)
            if text:
                Path(temporary).replace(self._path)
        finally:
            Path(temporary).unlink(missing_ok=True)


def report(recorder: Recorder) -> str:
    """The XML."""
    suites = ElementTree.Element("testsuites", name="aenv-build")
    interrupted = recorder.failed is not None and recorder.failed.code == Interrupted.code
    for build in recorder.builds:
        _suite(suites, build.title, [_of_step(build, step, interrupted) for step in build.steps.values()], build)
    failed = recorder.failed
    named = any(step.state in {"failed", "stopped"} for build in recorder.builds for step in build.steps.values())
    if failed is not None and not named:
        # Nothing of the plan is to blame: the recipe, the host, or the naming of the outputs.
        case = ElementTree.Element("testcase", classname="aenv-build", name="build", time="0.000")
        where = {"file": failed.place.file, "line": str(failed.place.line)} if failed.place else {}
        case.attrib.update({key: printable(value) for key, value in where.items()})
        _problem(case, "error", failed.code, f"{failed.message}\n{failed.fix}".strip())
        _suite(suites, "aenv-build", [case], None)
    for count in ("tests", "failures", "errors", "skipped"):
        suites.set(count, str(sum(int(suite.get(count, "0")) for suite in suites)))
    suites.set("time", _time(sum(build.milliseconds for build in recorder.builds)))
    ElementTree.indent(suites)
    body = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _suite(
    suites: ElementTree.Element, name: str, cases: list[ElementTree.Element], build: BuildRecord | None
) -> None:
    suite = ElementTree.SubElement(suites, "testsuite", name=printable(name), tests=str(len(cases)))
    for tag, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", _time(build.milliseconds if build else 0))
    suite.extend(cases)


def _of_step(build: BuildRecord, step: StepRecord, interrupted: bool) -> ElementTree.Element:
    stage = step.stage
    case = ElementTree.Element(
        "testcase",
        classname=f"{build.title}.{stage.verb}",
        name=stage.step,
        file=printable(stage.place.file),
        line=str(stage.place.line),
        time=_time(step.milliseconds),
    )
    match step.state:
        case "failed":
            _problem(case, "error" if step.died else "failure", stage.verb, step.message)
        case "stopped" if interrupted:
            _problem(case, "error", Interrupted.code, "it ran when the build was interrupted")
        case "not needed" | "waiting" | "running" | "stopped":
            why = step.why if step.state == "not needed" else "the build ended before it"
            ElementTree.SubElement(case, "skipped", message=printable(why))
    for message in step.retried:
        # As Maven's Surefire writes it: tries of a test that passed in the end, or never.
        _problem(case, "rerunFailure" if step.state == "failed" else "flakyFailure", stage.verb, message)
    said = "cached" if step.state == "cached" else "\n".join(step.lines)
    if said:
        ElementTree.SubElement(case, "system-out").text = _text(f"{stage.what}\n{said}")
    return case


def _problem(case: ElementTree.Element, tag: str, kind: str, message: str) -> None:
    first = message.partition("\n")[0]
    problem = ElementTree.SubElement(case, tag, type=kind, message=printable(first))
    problem.text = _text(message)


def _text(text: str) -> str:
    """XML 1.0 has no control characters, not even escaped ones."""
    return printable_lines(text[-MAX_TEXT:])


def _time(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.3f}"
