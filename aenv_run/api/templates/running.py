"""Builds as processes: bounded at a time, their events turned into a log and a state, ended with the server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from aenv_run import durable
from aenv_run.api.templates.records import Build, Level, Line, Records
from aenv_run.errors import AenvError, Conflict, MissingDependency, NotFound
from aenv_run.paths import Home
from aenv_run.process import is_alive, kill_group, read_start_ticks
from aenv_run.threads import in_thread
from aenv_run.types import Name

log = logging.getLogger(__name__)
#: The builder, as a program: nothing of it is imported here.
BUILDER = (sys.executable, "-m", "aenv_build.cli")
#: For a build that is told to stop, to end its machines.
STOP_S = 20.0
MAX_EVENT_BYTES = 1 << 20
#: Of the server alone, and nothing that a build should see.
_OWN_VARIABLES = ("AENV_API_KEY", "AENV_API_URL", "AENV_SERVE_CONFIG", "REGISTRY_AUTH_FILE")
WHAT_NEXT = "build again: steps that were finished are kept"


RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Prepared:
    """A recipe that is written: what each of its steps is called, and what to note at which step."""

    shown: Mapping[str, str]
    notes: Sequence[tuple[str, str]] = ()


#: Writes the recipe into the build's folder. Blocking.
Prepare: TypeAlias = Callable[[], Prepared]


class StepRefused(Exception):
    """A step cannot be built, before anything was."""

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(reason)
        self.step, self.reason = step, reason


@dataclass(frozen=True)
class Login:
    """Credentials of one build for one registry: in a file of that build, gone when it is over."""

    host: str
    username: str = field(repr=False)
    password: str = field(repr=False)

    def document(self) -> bytes:
        """As containers-auth.json(5) has it."""
        pair = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
        return json.dumps({"auths": {self.host: {"auth": pair}}}).encode()


@dataclass
class Builds:
    """The builds of a server. ``builder``: the program that builds a recipe."""

    home: Home
    records: Records
    max_running: int
    builder: tuple[str, ...] = BUILDER
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _turns: asyncio.Semaphore | None = None
    #: Held while one is started, so that it is started once.
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Held while one is looked for or begun that callers share.
    sharing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def begin(self, build: Build, prepare: Prepare, *, fresh: bool, login: Login | None) -> None:
        """Start it, or let it wait for its turn. Returns at once."""
        if build.build_id in self._tasks:
            raise Conflict(f"build {build.build_id} was started before")
        run = _Run(self, build, prepare, fresh, login)
        task = asyncio.get_running_loop().create_task(run.all())
        self._tasks[build.build_id] = task
        task.add_done_callback(lambda done: self._tasks.pop(build.build_id, None))

    @property
    def running(self) -> int:
        """How many run or wait for their turn."""
        return len(self._tasks)

    async def join(self, build_id: str) -> None:
        """Until that one is over; the caller may give up meanwhile."""
        task = self._tasks.get(build_id)
        if task is not None:
            await asyncio.wait([task])

    def is_running(self, build_id: str) -> bool:
        """Whether this server works on it."""
        return build_id in self._tasks

    @property
    def turns(self) -> asyncio.Semaphore:
        """One for each build that may run."""
        if self._turns is None:
            self._turns = asyncio.Semaphore(self.max_running)
        return self._turns

    async def recover(self) -> None:
        """After a start: what an earlier server left unfinished is told as failed, and its process ended."""
        for build in await asyncio.to_thread(self.records.all):
            if build.is_over or not build.started or self._is_at_work(build):
                continue
            if build.pid is not None and build.start_ticks is not None:
                await _end(build.pid, build.start_ticks)
            await asyncio.to_thread(
                self.finish, build.build_id, "error", f"the server was stopped while it was built; {WHAT_NEXT}"
            )

    def _is_at_work(self, build: Build) -> bool:
        """Whether this server, or another process of this home, works on it."""
        if self.is_running(build.build_id):
            return True
        pid, ticks = build.owner_pid, build.owner_ticks
        return pid is not None and ticks is not None and pid != os.getpid() and is_alive(pid, ticks)

    async def close(self) -> None:
        """End all that run; what they had finished is kept."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def running_of(self, template: Name) -> Build | None:
        """One of that template which this server works on."""
        for build_id in list(self._tasks):
            with contextlib.suppress(NotFound):  # it may end, and be forgotten, meanwhile
                build = await asyncio.to_thread(self.records.read, build_id)
                if build.template == template and not build.is_over:
                    return build
        return None

    def require_ours(self, build: Build) -> None:
        """``Conflict`` for a build that another process of this home works on."""
        begun = build.started and not build.is_over
        if begun and not self.is_running(build.build_id) and self._is_at_work(build):
            raise Conflict(
                f"template {build.template} is built by process {build.owner_pid}",
                fix="wait for it, or end that command with Ctrl-C",
            )

    async def cancel(self, build_id: str) -> None:
        """End one, if it runs."""
        task = self._tasks.get(build_id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def finish(
        self, build_id: str, status: str, reason: str | None = None, step: str | None = None, **more: object
    ) -> None:
        """Write how it ended, and let go of what it was made of. Blocking."""
        folder = self.records.folder(build_id)
        (folder / "auth.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "context", ignore_errors=True)
        level: Level = "info" if status == "ready" else "error"
        with contextlib.suppress(OSError, AenvError):
            told = "" if step is not None else f": {reason}"
            said = "Build finished" if status == "ready" else f"Build failed{told}"
            self.records.say(build_id, Line(at_s=time.time(), message=said, level=level, step=step), last=True)
        with contextlib.suppress(AenvError):  # it may have been deleted
            self.records.change(
                build_id, status=status, reason=reason, reason_step=step, finished_at_s=time.time(), pid=None,
                start_ticks=None, **more,
            )  # fmt: skip


class _Run:
    """One build from its turn to its end."""

    def __init__(self, builds: Builds, build: Build, prepare: Prepare, fresh: bool, login: Login | None) -> None:
        self._builds, self._records = builds, builds.records
        self._id, self._prepare = build.build_id, prepare
        self._fresh, self._login = fresh, login
        self._shown: Mapping[str, str] = {}
        self._left_out = 0
        self._began = False
        self._reason: str | None = None
        self._step: str | None = None
        self._made: dict[str, object] = {}
        self._failed = False
        #: Where in the recipe something is: its caller wrote none.
        self._place = re.compile(re.escape(str(self._records.folder(self._id) / RECIPE)) + r":\d+:\d+: ")

    async def all(self) -> None:
        """Never raises but when it is cancelled; whatever happens, the state says it."""
        try:
            async with self._builds.turns:
                await in_thread(self._records.change, self._id, status="building")
                prepared = await in_thread(self._prepare)
                self._shown = prepared.shown
                for step, note in prepared.notes:
                    await self._say(note, "warn", step)
                code = await self._run()
        except StepRefused as refused:
            await asyncio.to_thread(self._builds.finish, self._id, "error", refused.reason, refused.step)
            return
        except asyncio.CancelledError:
            await asyncio.to_thread(
                self._builds.finish, self._id, "error", f"the server was stopped while it was built; {WHAT_NEXT}"
            )
            raise
        except Exception as error:  # whatever it is, who waits for the build must hear of it
            log.exception("build %s", self._id)
            reason = str(error) if isinstance(error, AenvError) else "the server failed, see its log"
            await asyncio.to_thread(self._builds.finish, self._id, "error", reason)
            return
        if code == 0 and self._made:
            await asyncio.to_thread(self._builds.finish, self._id, "ready", None, None, **self._made)
            return
        reason = self._reason or f"the builder ended with {code} and said nothing"
        await asyncio.to_thread(self._builds.finish, self._id, "error", reason, self._step)

    async def _run(self) -> int:
        recipe = self._records.folder(self._id) / RECIPE
        argv = [
            *self._builds.builder,
            "build",
            str(recipe),
            "--events",
            "json",
            "--home",
            str(self._builds.home.root),
        ]
        argv += ["--no-cache"] if self._fresh else []
        environment = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        if self._login is not None:
            auth = self._records.folder(self._id) / "auth.json"
            await in_thread(durable.replace, auth, self._login.document())  # mode 0600
            environment["REGISTRY_AUTH_FILE"] = str(auth)
        elif named := os.environ.get("REGISTRY_AUTH_FILE"):
            environment["REGISTRY_AUTH_FILE"] = named
        # Told to stop when this server is gone, however it went.
        full = ["setpriv", "--pdeathsig", "TERM", "--", *argv]
        try:
            process = await asyncio.create_subprocess_exec(
                *full, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE, env=environment, start_new_session=True, limit=MAX_EVENT_BYTES,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise MissingDependency(f"{full[0]} is not installed", fix="run `aenv doctor`") from error
        ticks = read_start_ticks(process.pid)
        try:
            await in_thread(self._records.change, self._id, pid=process.pid, start_ticks=ticks)
            await self._follow(process)
            return await process.wait()
        except BaseException:
            await asyncio.shield(_stop(process))
            raise

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readuntil()
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    await self._take(error.partial)
                return
            except asyncio.LimitOverrunError as error:
                await process.stderr.read(max(1, error.consumed))  # no event is as long
                continue
            await self._take(line)

    async def _take(self, raw: bytes) -> None:
        try:
            event = json.loads(raw)
        except ValueError:
            event = None
        if not isinstance(event, dict):  # a warning of the interpreter, or an error from before the events
            if self._failed:
                return  # the same again, for people
            await self._say(self._plain(raw.decode(errors="replace").rstrip("\n")), "debug")
            return
        await self._told(
            {key: self._plain(value) if isinstance(value, str) else value for key, value in event.items()}
        )

    def _plain(self, text: str) -> str:
        """Without places in the recipe."""
        return self._place.sub("", text)

    async def _told(self, event: Mapping[str, object]) -> None:
        kind, id = event.get("event"), str(event.get("step", ""))
        step = step_name(id)
        what = self._shown.get(id) or str(event.get("what", id))
        match kind:
            case "build_started":
                await self._say(f"{event.get('total')} steps, {event.get('hits')} of them cached")
            case "stage_hit":
                self._began = self._began or step != "base"
                await self._say(f"CACHED {what}", step=step)
            case "stage_started":
                self._began = self._began or step != "base"
                await self._say(what, step=step)
            case "stage_output":
                await self._say(str(event.get("text", "")), step=step)
            case "stage_note":
                await self._say(str(event.get("text", "")), "warn", step)
            case "stage_retried":
                await self._say(str(event.get("message", "")), "warn", step)
            case "stage_finished":
                await self._say(f"DONE {what} ({event.get('milliseconds')} ms)", "debug", step)
            case "stage_failed":
                self._reason, self._step = str(event.get("message", "")), step
                await self._say(self._reason, "error", step)
            case "output_published":
                self._made = {"version": int(str(event["version"])), "snapshot_id": str(event["snapshot_id"])}
                await self._say(f"{event.get('name')}:{event.get('version')}", step=step)
            case "build_failed":
                self._failed = True
                if self._reason is None:
                    fix = f" ({event['fix']})" if event.get("fix") else ""
                    where = "finalize" if self._began else "base"  # no step of its own failed
                    self._reason, self._step = f"{event.get('message')}{fix}", where
                    await self._say(self._reason, "error", where)

    async def _say(self, message: str, level: Level = "info", step: str | None = None) -> None:
        line = Line(at_s=time.time(), message=message, level=level, step=step)
        try:
            kept = await asyncio.to_thread(self._records.say, self._id, line)
        except OSError:
            kept = False
        if not kept:
            self._left_out += 1
            if self._left_out == 1:
                with contextlib.suppress(OSError):
                    full = Line(
                        at_s=time.time(), message="the log is full; what follows is left out", level="warn"
                    )
                    await asyncio.to_thread(self._records.say, self._id, full, last=True)


def step_name(id: str) -> str | None:
    """A recipe's step as SDKs call it: ``base``, the number of their own step, or ``finalize``."""
    if id.startswith("step-"):
        return id.removeprefix("step-").partition(".")[0]
    return id if id in {"base", "finalize"} else "finalize" if id else None


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.communicate()
    except TimeoutError:
        log.warning("a build did not stop within %g s and is killed", STOP_S)
    kill_group(process.pid)
    await process.wait()


async def _end(pid: int, start_ticks: int) -> None:
    """A build of a server that is gone: it was told to stop then."""
    until_s = time.monotonic() + STOP_S
    while is_alive(pid, start_ticks) and time.monotonic() < until_s:  # noqa: ASYNC110 - not our child
        await asyncio.sleep(0.2)
    if is_alive(pid, start_ticks):
        kill_group(pid)
