"""The steps that are measured, the same for every driver: ours through SDK and node, and its twin by hand."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from aenv_run.drivers import gvisor_cgroup
from aenv_run.drivers.protocol import Driver
from aenv_run.network.addressing import NETNS_DIRECTORY
from aenv_run.node_client import NodeClient
from aenv_run.node_wire import ForkEntry, ForkRequest, ForkStart, PoolRequest
from aenv_run.paths import Home
from aenv_run.sandbox_record import SandboxDirectory
from aenv_run.sdk_async import AsyncSandbox
from aenv_run.types import SandboxId
from tests.perf.footprint import Memory, engines_in, is_there, memory_of, tree
from tests.perf.report import MemoryRow, Row
from tests.perf.twin import TRUE, BareMachine, T, Twin, milliseconds

DISK_ONLY, WITH_MEMORY = "bench-disk", "bench"
WORK = (
    "/bin/sh",
    "-c",
    "dd if=/dev/zero of=/tmp/work bs=1M count=8 2>&1; dd if=/dev/zero of=/dev/null bs=8M count=1 2>&1",
)
CHILDREN = 16
LIFE_S = 3600.0
POLL_S, SETTLE_S = 0.0005, 0.2


@dataclass
class Steps:
    """One home with one snapshot, of one driver. ``began`` is told which step comes next."""

    home: Home
    driver: Driver
    twin: Twin
    rounds: int
    began: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)

    async def run(self, only: str = "") -> None:
        """Every step, or those with this word in their name."""
        for name, step in (
            ("launch from memory", self.launch),
            ("pause and resume", self.pause_and_resume),
            ("reset", self.reset),
            ("launch and reset from a pool", self.from_pool),
            ("close", self.close),
            *((f"fork to {count}", lambda count=count: self.fork(count)) for count in (1, 4, CHILDREN)),
            ("memory per child", self.memory_per_child),
            ("cold boot", self.cold_boot),
        ):
            self.began(name)
            if only in name:
                await step()

    async def by_hand(self, work: Callable[[], T]) -> T:
        """In a thread of the twin's own; a cancel ends the twin, and this with it."""
        return await asyncio.get_running_loop().run_in_executor(self.twin.pool, work)

    async def start(self, snapshot: str = WITH_MEMORY) -> AsyncSandbox:
        """One that has answered its first command."""
        cold = snapshot == DISK_ONLY
        sandbox = await AsyncSandbox.create(snapshot, home=self.home, timeout=LIFE_S, cold=cold)
        await sandbox.commands.run(list(TRUE))
        return sandbox

    def start_bare(self, make: Callable[[], BareMachine]) -> tuple[BareMachine, float]:
        """The same by hand, and how long it took (ms)."""
        start = time.perf_counter()
        machine = make()
        machine.run()
        return machine, (time.perf_counter() - start) * 1000

    async def measure(
        self,
        step: str,
        ours: Callable[[], Awaitable[float]],
        bare: Callable[[], float],
        rounds: int,
        note: str = "",
    ) -> None:
        """Ours and bare in turn, so that both see the same machine; the first of each is not counted."""
        mine: list[float] = []
        theirs: list[float] = []
        for number in range(rounds + 1):
            own = await ours()
            other = await self.by_hand(bare)
            if number:
                mine.append(own)
                theirs.append(other)
        self.rows.append(Row(step, mine, theirs, note))

    # -- start ---------------------------------------------------------------------------------------------

    async def launch(self) -> None:
        """Create from memory and the first command."""
        await self.measure(
            "launch", self._launched(WITH_MEMORY), self._launched_bare(self.twin.restore), self.rounds
        )

    async def cold_boot(self) -> None:
        """Create from the disk and the first command."""
        rounds = max(3, self.rounds // 3)
        await self.measure("cold boot", self._launched(DISK_ONLY), self._launched_bare(self.twin.boot), rounds)

    def _launched(self, snapshot: str) -> Callable[[], Awaitable[float]]:
        async def launched() -> float:
            start = time.perf_counter()
            sandbox = await self.start(snapshot)
            elapsed = (time.perf_counter() - start) * 1000
            await sandbox.kill()
            return elapsed

        return launched

    def _launched_bare(self, make: Callable[[], BareMachine]) -> Callable[[], float]:
        def launched() -> float:
            self.twin.make_ready(1)
            machine, elapsed = self.start_bare(make)
            machine.end()
            machine.tidy()
            return elapsed

        return launched

    # -- pause and resume ----------------------------------------------------------------------------------

    async def pause_and_resume(self) -> None:
        """Both of one sandbox, again and again; it is resumed when nothing of its machine is left."""
        pauses: list[float] = []
        gone: list[float] = []
        resumes: list[float] = []
        bare_pauses: list[float] = []
        bare_resumes: list[float] = []
        async with await self.start() as sandbox:
            for number in range(self.rounds + 1):
                pids = tree(self._engines(sandbox))
                start = time.perf_counter()
                await sandbox.pause()
                paused = (time.perf_counter() - start) * 1000
                await asyncio.to_thread(_wait_while, functools.partial(_any_is_there, pids))
                ended = (time.perf_counter() - start) * 1000
                start = time.perf_counter()
                await sandbox.resume(timeout=LIFE_S)
                await sandbox.commands.run(list(TRUE))
                resumed = (time.perf_counter() - start) * 1000
                bare_paused, bare_resumed = await self.by_hand(self._paused_bare)
                if number:
                    pauses.append(paused)
                    gone.append(ended)
                    resumes.append(resumed)
                    bare_pauses.append(bare_paused)
                    bare_resumes.append(bare_resumed)
        self.rows.append(Row("pause, answered", pauses, bare_pauses, "a"))
        self.rows.append(Row("pause, machine gone", gone, bare_pauses, "a"))
        self.rows.append(Row("resume", resumes, bare_resumes))

    def _paused_bare(self) -> tuple[float, float]:
        self.twin.make_ready(1)
        machine, elapsed = self.start_bare(self.twin.restore)
        paused = self.twin.pause(machine)
        machine.tidy()
        return paused, elapsed

    # -- fork ----------------------------------------------------------------------------------------------

    async def fork(self, count: int) -> None:
        """The parent's stop, the first child's command, all children's commands."""
        ours: list[tuple[float, float, float]] = []
        bare: list[tuple[float, float, float]] = []
        rounds = self.rounds if count < CHILDREN else max(3, self.rounds // 3)
        async with await self.start() as parent:
            for number in range(rounds + 1):
                own = await self._forked(parent, count)
                other = await self._forked_bare(count)
                if number:
                    ours.append(own)
                    bare.append(other)
        for at, what in enumerate(("stop", "first", "all")):
            note = "b" if what == "stop" else "c"
            self.rows.append(Row(f"fork {count}, {what}", [o[at] for o in ours], [b[at] for b in bare], note))

    async def _forked(self, parent: AsyncSandbox, count: int) -> tuple[float, float, float]:
        client = NodeClient(self.home)
        start = time.perf_counter()
        stopped = 0.0

        async def answered(child: AsyncSandbox) -> float:
            await child.commands.run(list(TRUE))
            return (time.perf_counter() - start) * 1000

        children: list[AsyncSandbox] = []
        async with asyncio.TaskGroup() as group:
            answers: list[asyncio.Task[float]] = []
            request = ForkRequest(count=count, timeout_s=LIFE_S)
            async for line in client.fork_each(parent.sandbox_id, request):
                if isinstance(line, ForkStart):
                    stopped = line.stopped_ms
                elif isinstance(line, ForkEntry):
                    assert line.sandbox is not None, line
                    children.append(AsyncSandbox(line.sandbox, client))
                    answers.append(group.create_task(answered(children[-1])))
        await asyncio.gather(*(child.kill() for child in children))
        times = [answer.result() for answer in answers]
        return stopped, min(times), max(times)

    async def _forked_bare(self, count: int) -> tuple[float, float, float]:
        def save() -> float:
            self.twin.make_ready(1 + count)
            machine, _ = self.start_bare(self.twin.restore)
            saved = self.twin.save(machine)
            machine.end()
            machine.tidy()
            return saved

        stopped = await self.by_hand(save)
        start = time.perf_counter()

        def child() -> tuple[BareMachine, float]:
            machine, _ = self.start_bare(self.twin.restore)
            return machine, (time.perf_counter() - start) * 1000

        found = await asyncio.gather(*(self.by_hand(child) for _ in range(count)))
        for machine, _ in found:
            await self.by_hand(machine.end)
            await self.by_hand(machine.tidy)
        times = [elapsed for _, elapsed in found]
        return stopped, stopped + min(times), stopped + max(times)

    # -- the end -------------------------------------------------------------------------------------------

    async def reset(self) -> None:
        """An episode is over, the next begins: kill, create from the same snapshot, first command."""

        async def ours() -> float:
            sandbox = await self.start()
            start = time.perf_counter()
            await sandbox.kill()
            sandbox = await self.start()
            elapsed = (time.perf_counter() - start) * 1000
            await sandbox.kill()
            return elapsed

        await self.measure("reset", ours, self._reset_bare, self.rounds, "d")

    async def from_pool(self) -> None:
        """Launch and reset with a machine that stands ready; the pool is full again before the next."""
        client = NodeClient(self.home)
        await client.set_pool(PoolRequest(snapshot=WITH_MEMORY, low=1, high=1))

        async def filled() -> float:
            while True:
                await asyncio.sleep(SETTLE_S)
                if (await client.pools())[0].ready:
                    break
            return time.perf_counter()

        async def launched() -> float:
            start = await filled()
            sandbox = await self.start()
            elapsed = (time.perf_counter() - start) * 1000
            await sandbox.kill()
            return elapsed

        bare = self._launched_bare(self.twin.restore)
        await self.measure("launch, one ready", launched, bare, self.rounds)
        sandbox = await self.start()

        async def reset() -> float:
            start = await filled()
            await sandbox.reset(timeout=LIFE_S)
            await sandbox.commands.run(list(TRUE))
            return (time.perf_counter() - start) * 1000

        await self.measure("reset, one ready", reset, self._reset_bare, self.rounds, "d")
        await sandbox.kill()
        await client.remove_pool(WITH_MEMORY)

    def _reset_bare(self) -> float:
        self.twin.make_ready(2)
        machine, _ = self.start_bare(self.twin.restore)
        elapsed = milliseconds(machine.end)
        second, started = self.start_bare(self.twin.restore)
        for one in (machine, second):
            one.end()
            one.tidy()
        return elapsed + started

    async def close(self) -> None:
        """Kill: until the caller has its answer, and until nothing of the machine is left on the host."""
        answered: list[float] = []
        gone: list[float] = []
        bare_answered: list[float] = []
        bare_gone: list[float] = []
        for number in range(self.rounds + 1):
            own = await self._closed()
            other = await self.by_hand(self._closed_bare)
            if number:
                answered.append(own[0])
                gone.append(own[1])
                bare_answered.append(other[0])
                bare_gone.append(other[1])
        self.rows.append(Row("close, answered", answered, bare_answered, "e"))
        self.rows.append(Row("close, nothing left", gone, bare_gone, "e"))

    async def _closed(self) -> tuple[float, float]:
        sandbox = await self.start()
        left = self._left_of(sandbox)
        start = time.perf_counter()
        await sandbox.kill()
        answered = (time.perf_counter() - start) * 1000
        await asyncio.to_thread(_wait_while, left)
        return answered, (time.perf_counter() - start) * 1000

    def _left_of(self, sandbox: AsyncSandbox) -> Callable[[], bool]:
        """Whether anything of it is left: processes, directory, control groups, namespaces."""
        directory = self._directory(sandbox)
        slot = directory.read().slot
        paths = [directory.root, *gvisor_cgroup.directories(gvisor_cgroup.name_of(directory.machine.absolute()))]
        if slot is not None:
            paths += [NETNS_DIRECTORY / slot.router_name, NETNS_DIRECTORY / slot.guest_name]
        pids = tree(self._engines(sandbox))
        return lambda: _any_is_there(pids) or any(path.exists() for path in paths)

    def _closed_bare(self) -> tuple[float, float]:
        self.twin.make_ready(1)
        machine, _ = self.start_bare(self.twin.restore)
        ended = milliseconds(machine.end)
        return ended, ended + milliseconds(machine.tidy)

    # -- memory --------------------------------------------------------------------------------------------

    async def memory_per_child(self) -> None:
        """Of as many machines of one snapshot: after the first command, and after a little work."""
        async with AsyncExitStack() as ends:
            children = []
            for _ in range(CHILDREN):
                children.append(await ends.enter_async_context(await self.start()))
            idle = [self._held(child) for child in children]
            for child in children:
                await child.commands.run(list(WORK), check=True)
            worked = [self._held(child) for child in children]
        machines = [await self.by_hand(self._start_bare_child) for _ in range(CHILDREN)]
        bare_idle = [memory_of(machine.engines(), machine.groups) for machine in machines]
        for machine in machines:
            await self.by_hand(functools.partial(machine.run, WORK))
        bare_worked = [memory_of(machine.engines(), machine.groups) for machine in machines]
        for machine in machines:
            await self.by_hand(machine.end)
            await self.by_hand(machine.tidy)
        self.memory.append(MemoryRow("idle", CHILDREN, idle, bare_idle))
        self.memory.append(MemoryRow("after work (f)", CHILDREN, worked, bare_worked))

    def _start_bare_child(self) -> BareMachine:
        self.twin.make_ready(1)
        return self.start_bare(self.twin.restore)[0]

    def _held(self, sandbox: AsyncSandbox) -> Memory:
        directory = self._directory(sandbox).machine.absolute()
        groups = gvisor_cgroup.directories(gvisor_cgroup.name_of(directory))
        return memory_of(self._engines(sandbox), [group for group in groups if group.exists()])

    def _directory(self, sandbox: AsyncSandbox) -> SandboxDirectory:
        return SandboxDirectory(self.home.sandboxes / SandboxId(sandbox.sandbox_id))

    def _engines(self, sandbox: AsyncSandbox) -> list[int]:
        return engines_in(self._directory(sandbox).machine)


def _any_is_there(pids: list[int]) -> bool:
    return any(map(is_there, pids))


def _wait_while(there: Callable[[], bool]) -> None:
    while there():
        time.sleep(POLL_S)
