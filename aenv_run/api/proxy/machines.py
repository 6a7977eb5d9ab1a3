"""Connections into machines. They end with their machine: nobody waits for one that was paused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aenv_run.api.proxy import refusals
from aenv_run.api.proxy.address import ENVD_PORT, Target
from aenv_run.api.proxy.places import Door, Place, Places
from aenv_run.api.proxy.refusals import Refused
from aenv_run.errors import AenvError, NotFound
from aenv_run.guest import open_port

log = logging.getLogger(__name__)

CONNECT_S = 5.0
#: How often the records of sandboxes with open connections are looked at.
WATCH_S = 0.2
#: Of the daemon of one machine, kept for the next request. Services get a new connection each time: one that
#: handles a single connection at a time must not wait for us.
MAX_IDLE = 16
BUFFER_BYTES = 1 << 19
#: A machine that nobody used for so long is forgotten, and its kept connections are closed.
IDLE_S = 60.0
ENDED = "the sandbox was paused, or its machine ended"


@dataclass(eq=False)
class Connection:
    """A stream to the daemon or to a service. ``used``: it carried a request before."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False

    def drop(self) -> None:
        """Close it at once."""
        self.writer.transport.abort()


@dataclass(eq=False)
class Machine:
    """All connections into one machine."""

    place: Place
    stamp: object
    over: bool = False
    quiet_s: float = 0.0
    idle: list[Connection] = field(default_factory=list)
    _users: set[Callable[[], None]] = field(default_factory=set)

    async def connect(self, target: Target, *, fresh: bool = False) -> Connection:
        """To the target's port, within 5 s; ``fresh``: not one that was kept. ``Refused``."""
        if target.port == ENVD_PORT and not fresh and (kept := self._take()) is not None:
            return kept
        place = self.place
        try:
            async with asyncio.timeout(CONNECT_S):
                if target.port == ENVD_PORT:
                    opened = await asyncio.open_connection(
                        place.endpoint.host, place.endpoint.port, limit=BUFFER_BYTES
                    )
                else:
                    opened = await open_port(place.endpoint, target.port, access_token=place.door.access_token)
        except TimeoutError as error:
            raise refusals.too_slow(target, f"no connection within {CONNECT_S:g} s") from error
        except NotFound as error:
            raise refusals.closed_port(target) from error
        except (AenvError, OSError) as error:
            raise _unsent(target, error.message if isinstance(error, AenvError) else str(error)) from error
        connection = Connection(*opened)
        if self.over:
            connection.drop()
            raise _unsent(target, ENDED)
        return connection

    @contextmanager
    def using(self, end: Callable[[], None]) -> Iterator[None]:
        """``end`` is called when the machine ends before the context does."""
        self._users.add(end)
        try:
            yield
        finally:
            self._users.discard(end)

    def give_back(self, connection: Connection) -> None:
        """Keep it for another request to the daemon."""
        if self.over or len(self.idle) >= MAX_IDLE or connection.reader.at_eof():
            connection.writer.close()
            return
        connection.used = True
        self.idle.append(connection)

    def end(self) -> None:
        """Break off everything that is open."""
        self.over = True
        for connection in self.idle:
            connection.drop()
        self.idle.clear()
        for user in list(self._users):
            user()

    @property
    def busy(self) -> bool:
        """Whether somebody uses it now."""
        return bool(self._users)

    def _take(self) -> Connection | None:
        while self.idle:
            connection = self.idle.pop()
            if not connection.reader.at_eof() and not connection.writer.transport.is_closing():
                return connection
            connection.drop()
        return None


def _unsent(target: Target, why: str) -> Refused:
    refused = refusals.unreachable(target, why)
    refused.unsent = True
    return refused


class Machines:
    """The machines with connections, and the watch over them."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._machines: dict[str, Machine] = {}
        self._watch: asyncio.Task[None] | None = None
        self._asked: dict[str, asyncio.Task[None]] = {}

    async def open(
        self, target: Target, check: Callable[[Door], object], *, fresh: bool = False
    ) -> tuple[Machine, Connection]:
        """A connection to the target's port; ``Refused``. A paused sandbox is woken if ``check`` allows it.

        ``fresh``: one that carried nothing before. A machine that is not there any more is looked for once again.
        """
        try:
            machine = await self._machine(target, check)
            return machine, await machine.connect(target, fresh=fresh)
        except Refused as refused:
            if not refused.unsent:
                raise
        self.forget(target)
        machine = await self._machine(target, check)
        return machine, await machine.connect(target, fresh=fresh)

    async def _machine(self, target: Target, check: Callable[[Door], object]) -> Machine:
        stamp = self._places.stamp(target.sandbox_id)
        place = await self._places.find(target, check)
        check(place.door)
        found = self._machines.get(target.sandbox_id)
        if found is not None and not found.over and found.place.machine == place.machine:
            found.place = place  # its other settings may have changed
            return found
        if found is not None:
            found.end()
        machine = Machine(place, stamp)
        self._machines[target.sandbox_id] = machine
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look_after(), name="the proxy's watch over machines")
        return machine

    def forget(self, target: Target) -> None:
        """The machine did not answer: ask where it is before the next request."""
        self._places.forget(target.sandbox_id)

    async def close(self) -> None:
        """End all connections."""
        for machine in self._machines.values():
            machine.end()
        self._machines.clear()
        tasks = [*self._asked.values(), *([self._watch] if self._watch is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_after(self) -> None:
        """Only a record that changed is asked for; a node that does not answer ends nothing."""
        while self._machines:
            await asyncio.sleep(WATCH_S)
            for name, machine in list(self._machines.items()):
                stamp = self._places.stamp(machine.place.sandbox_id)
                if stamp != machine.stamp and name not in self._asked:
                    self._asked[name] = asyncio.create_task(self._look_at(name, machine, stamp))
                machine.quiet_s = 0.0 if machine.busy else machine.quiet_s + WATCH_S
                if machine.quiet_s > IDLE_S:
                    machine.end()
                if machine.over and self._machines.get(name) is machine:
                    del self._machines[name]

    async def _look_at(self, name: str, machine: Machine, stamp: object) -> None:
        try:
            place = await self._places.now(machine.place.sandbox_id)
            machine.stamp = stamp
            if place is None or place.machine != machine.place.machine:
                machine.end()
        except (AenvError, OSError) as error:
            log.warning("%s: the node does not say where it is: %s", name, error)
        finally:
            self._asked.pop(name, None)
