"""For every session: nothing that it started or made is left on the host when it ends.

Processes are known by an environment variable that all children inherit, test processes and what they start. The
rest is compared with the start of the session; where others work on the same host, only what names this session's
temporary directory counts.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis
import pytest

from tests.crash.table import rows
from tests.leftovers import MARKER, Process, others_work_here, processes, resources
from tests.s3 import swift
from tests.s3.server import CREDENTIALS, Server, moto

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("aenv", deadline=None)
hypothesis.settings.load_profile("aenv")

SETTLE_SECONDS = 5.0  # what is being torn down off the path may take this long


@dataclass(frozen=True)
class Watch:
    """What this host had when the session began."""

    session: str
    before: frozenset[str]

    def left(self, directory: str) -> tuple[set[Process], set[str]]:
        """Processes and resources that are there and should not be, after they had time to go."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := processes(self.session)) or resources() - self.before:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        made = resources() - self.before
        if others_work_here(self.session):
            made = {name for name in made if directory in name}
        return left, made


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """moto's S3 server, and credentials for it in the environment of this process and those that it starts."""
    with moto() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def swift_node() -> Iterator[Server]:
    """OpenStack Swift on this host."""
    with swift.swift() as server:
        yield server


@pytest.fixture
def swift_server(swift_node: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The same, with its credentials in the environment."""
    for name, value in swift.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return swift_node


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is ``long`` is left to `make soak`: it repeats, on another driver or store, what a test here shows."""
    if os.environ.get("AENV_SOAK"):
        return
    left = {item for item in items if any(_is_long(item, mark) for mark in item.iter_markers("long"))}
    if left:
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def _is_long(item: pytest.Item, mark: pytest.Mark) -> bool:
    return not mark.args or item.name.partition("[")[2].rstrip("]") in mark.args


WATCH = pytest.StashKey[Watch]()


def pytest_configure() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and every child would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Only where the session is led: its test processes inherit the mark."""
    if not hasattr(session.config, "workerinput"):
        mark = os.environ[MARKER] = uuid.uuid4().hex
        session.config.stash[WATCH] = Watch(mark, frozenset(resources()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session, and name what is left; processes are killed."""
    watch = session.config.stash.get(WATCH, None)
    if watch is None:
        return
    basetemp = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    left, made = watch.left(str(basetemp))
    for process in left:
        process.kill()
    if names := [*map(str, sorted(left)), *sorted(made)]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for line in ("left behind by this session (processes were killed now):", *names):
            reporter.write_line(f"  {line}", red=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where acts were stopped, if they were."""
    reports = terminalreporter.getreports("passed")
    if lines := rows(found for report in reports for found in report.user_properties):
        terminalreporter.section("crash points")
        for line in lines:
            terminalreporter.write_line(line)
