"""A driver without virtual machines: its "memory" is a dictionary in a file, its "guest" an HTTP handler.

It keeps the promises that the node relies on (chains, captures, attach after a restart), so that the node's own
logic is tested in milliseconds. tests/e2e runs the same operations on real machines.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from aenv_run import nbd_client
from aenv_run.capture import Capture
from aenv_run.drivers.protocol import (
    BootSpec,
    Caps,
    DriverName,
    Endpoint,
    MachineExit,
    MachineState,
    Probe,
    RestoreSpec,
)
from aenv_run.errors import BootFailed, RestoreIncompatible, SandboxDead, StoreUnavailable
from aenv_run.guest import Guest
from aenv_run.guest.connect import END_OF_STREAM, envelope
from aenv_run.nbd import DiskLayer, ServedLayer
from aenv_run.snapshot import MemoryFacts
from aenv_run.types import Digest, MachineSpec

ZERO = Digest("sha256:" + "0" * 64)
FACTS = MemoryFacts(
    driver="qemu", vmm_version="1", mode="tcg", cpu="any", kernel_digest=ZERO, envd_digest=ZERO, devices="none"
)


@dataclass(frozen=True)
class Ran:
    """A command that the "guest" was told to run: its last word, environment and user, and who it was then."""

    command: str
    env: dict[str, str]
    user: str | None
    hostname: str


def said_by(ran: Ran) -> list[tuple[str, bytes]]:
    """What a command says unless a test wants something else."""
    return [("stderr", f"said by {ran.command}\n".encode())]


@dataclass
class PretendMachine:
    """One "machine". What it "has in memory" is ``memory``; sealed layers are files of its directory."""

    directory: Path
    endpoint: Endpoint
    engine: PretendEngine
    memory: dict[str, str]
    memory_roles: tuple[str, ...] = ()  # of the image it was restored from: a base and layers of what changed
    pid: int = 0
    sealed: list[Path] = field(default_factory=list)
    token: str | None = None
    init_count: int = 0
    restored_flag: bool = False
    ran: list[Ran] = field(default_factory=list)
    running: bool = True
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    async def state(self) -> MachineState:
        if self.dead.is_set():
            return MachineState.DEAD
        return MachineState.RUNNING if self.running else MachineState.PAUSED

    async def pause(self) -> None:
        self._alive()
        self.running = False

    async def resume(self) -> None:
        self._alive()
        self.running = True

    async def capture(self, directory: Path, *, memory: bool, keep_running: bool = True) -> Capture:
        self._alive()
        if self.engine.capture_gate is not None:
            await self.engine.capture_gate.wait()
        if self.engine.fail_capture is not None:
            raise self.engine.fail_capture
        assert self.token is None or not memory, "a capture without detach would copy the token"
        layer = self.directory / f"sealed-{len(self.sealed)}.qcow2"
        layer.write_text(f"layer of {self.directory.parent.name} {len(self.sealed)}")
        self.sealed.append(layer)
        directory.mkdir()
        try:
            files = self._fill(directory, memory)
        except BaseException:
            shutil.rmtree(directory)
            raise
        self.running = keep_running
        disk = tuple(directory / sealed.name for sealed in self.sealed)
        facts = await self.engine.facts(MachineSpec())
        below = self.memory_roles if memory else ()
        return Capture(directory, disk, files, facts if memory else None, 1.0, below)

    def _fill(self, directory: Path, memory: bool) -> dict[str, Path]:
        for sealed in self.sealed:
            os.link(sealed, directory / sealed.name)
        if not memory:
            return {}
        role = f"ram.{len(self.memory_roles)}" if self.memory_roles else "ram"
        files = {role: directory / role, "device_state": directory / "device_state"}
        files[role].write_text(json.dumps(self.memory))
        files["device_state"].write_text("devices")
        return files

    async def wait(self) -> MachineExit:
        await self.dead.wait()
        return MachineExit(self.reason, "last console line")

    async def console(self) -> str:
        return "last console line"

    async def kill(self) -> None:
        self.end("killed")
        self.engine.machines.pop(self.endpoint.port, None)

    def end(self, reason: str) -> None:
        """As if the engine had ended."""
        self.reason = self.reason or reason
        self.dead.set()

    def _alive(self) -> None:
        if self.dead.is_set():
            raise SandboxDead("the engine is gone")


class PretendEngine:
    """The driver; ``machines`` are those that live, by port. They outlive a node, as real ones do."""

    caps = Caps(
        memory_snapshot=True, live_capture=True, shares_memory=True, native_speed=False, served_layers=True
    )

    def __init__(self, name: DriverName = DriverName.QEMU, first_port: int = 20000) -> None:
        self.name = name
        self.usable = True
        self.deaf: set[Path] = set()  # machines in these directories whose guests never answer
        self.no_attach: set[Path] = set()  # as if the machine's own record was damaged
        self.machines: dict[int, PretendMachine] = {}
        self.fail_capture: Exception | None = None
        self.capture_gate: asyncio.Event | None = None
        self.deep, self.too_deep = 8, 16  # layers
        self.merge_gate: asyncio.Event | None = None
        self.fail_merge: Exception | None = None
        self.boot_gate: asyncio.Event | None = None
        self.fail_launches: set[int] = set()
        self.hold_launches: set[int] = set()  # these never end
        self.outcomes: dict[str, int | str] = {}  # of commands: their exit code, or an error's code; 0 without one
        self.output: Callable[[Ran], list[tuple[str, bytes]]] = said_by  # of a command: pieces of its streams
        self.put: list[tuple[str, bytes]] = []  # files and archives that guests were given, by path
        self.removed: list[str] = []  # paths
        self.moved: list[tuple[str, str]] = []
        self.there: dict[str, str] = {}  # the type of what Stat finds, by path
        self.archives: dict[str, bytes] = {}  # what guests give of a path
        self.first_outcomes: dict[str, list[int | str]] = {}  # of a command's first runs, before ``outcomes``
        self.deadly: set[str] = set()  # commands in which their machine ends
        self.command_gate: asyncio.Event | None = None
        self.launches = itertools.count()
        self.incompatible = False
        self.disks: list[tuple[DiskLayer, ...]] = []
        self.read: dict[str, bytes] = {}  # the last byte of each served layer
        self.commands: list[str] = []  # the last words of all that guests ran, in order
        self._ports = itertools.count(first_port)

    async def probe(self) -> Probe:
        return Probe(self.name, self.usable, "tcg", "pretended")

    async def facts(self, machine: MachineSpec) -> MemoryFacts:
        return FACTS.model_copy(update={"driver": self.name.value})

    async def check_restore(self, spec: RestoreSpec) -> None:
        if self.incompatible:
            raise RestoreIncompatible("the cpu differs")

    async def boot(self, spec: BootSpec) -> PretendMachine:
        return await self._start(spec, {})

    async def restore(self, spec: RestoreSpec) -> PretendMachine:
        await self.check_restore(spec)
        roles = ram_roles(spec.memory)
        memory = {key: value for role in roles for key, value in json.loads(spec.memory[role].read_text()).items()}
        machine = await self._start(spec, memory)
        machine.memory_roles = roles
        return machine

    async def merge_memory(
        self, memory: Mapping[str, Path], target: Path, *, eager: bool
    ) -> dict[str, Path] | None:
        base, *layers = ram_roles(memory)
        if len(layers) <= (self.deep if eager else self.too_deep):
            return None
        whole = {key: value for role in layers for key, value in json.loads(memory[role].read_text()).items()}
        target.write_text(json.dumps(whole))
        try:
            if self.merge_gate is not None:
                await self.merge_gate.wait()
            if self.fail_merge is not None:
                raise self.fail_merge
        except BaseException:
            target.unlink()
            raise
        return {base: memory[base], f"{base}.1": target, "device_state": memory["device_state"]}

    async def attach(self, directory: Path) -> PretendMachine | None:
        if directory in self.no_attach:
            return None
        return next((m for m in self.machines.values() if m.directory == directory), None)

    async def sweep(self, directory: Path) -> bool:
        found = [m for m in self.machines.values() if m.directory == directory]
        for machine in found:
            await machine.kill()
        return bool(found)

    async def _start(self, spec: BootSpec, memory: dict[str, str]) -> PretendMachine:
        for layer in spec.disk:
            if isinstance(layer, ServedLayer):
                await self._read(layer)
            else:
                assert layer.is_file(), layer
        assert spec.directory.is_dir() and not any(spec.directory.iterdir())
        self.disks.append(spec.disk)
        if self.boot_gate is not None:
            await self.boot_gate.wait()
        number = next(self.launches)
        if number in self.hold_launches:
            await asyncio.Event().wait()
        if number in self.fail_launches:
            raise BootFailed("it did not boot")
        port = next(self._ports)
        machine = PretendMachine(spec.directory, Endpoint("127.0.0.1", port), self, memory)
        self.machines[port] = machine
        return machine

    async def _read(self, layer: ServedLayer) -> None:
        """As a machine reads its disk: what it must have to come up, and the reason is not told."""
        for at in (0, layer.size_bytes - 1):
            try:
                self.read[layer.export] = await asyncio.to_thread(nbd_client.read, layer, at, 1)
            except StoreUnavailable as error:
                raise BootFailed("I/O error") from error

    def guest(self, endpoint: Endpoint, access_token: str | None) -> Guest:
        """The node's guest factory."""
        return Guest(endpoint, access_token=access_token, transport=httpx.MockTransport(self._answer))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        machine = self.machines.get(request.url.port or 0)
        if machine is None or machine.dead.is_set() or not machine.running:
            raise httpx.ConnectError("connection refused", request=request)
        if machine.directory in self.deaf:
            await asyncio.Event().wait()
        path = request.url.path
        if path == "/health":
            return httpx.Response(204)
        if path == "/init":
            body = json.loads(request.content)
            if machine.token not in (None, body["accessToken"]):
                return httpx.Response(409, json={"code": 409, "message": "another token"})
            machine.token = body["accessToken"]
            machine.init_count += 1
            machine.restored_flag = body.get("restored", False)
            machine.memory["hostname"] = body["hostname"]
            machine.memory["machine_id"] = body["machineId"]
            machine.memory["env"] = json.dumps(body["envVars"], sort_keys=True)
            return httpx.Response(204)
        if machine.token is not None and request.headers.get("X-Access-Token") != machine.token:
            return httpx.Response(401, json={"code": 401, "message": "wrong token"})
        if path == "/metrics":
            return httpx.Response(200, json={"cpu_count": 1, "cpu_used_pct": 5.5, "mem_used": 7, "mem_total": 9})
        if path in {"/files", "/aenv/archive"} and request.method in {"POST", "PUT"}:
            self.put.append((request.url.params["path"], await request.aread()))
        if path == "/aenv/archive" and request.method == "GET":
            return httpx.Response(200, content=_stream(self.archives[request.url.params["path"]]))
        if path.startswith("/filesystem.Filesystem/"):
            return self._on_files(path.rpartition("/")[2], json.loads(request.content))
        if path == "/process.Process/Start":
            return await self._run(machine, request)
        if path == "/aenv/detach":
            machine.token = None
        return httpx.Response(204)

    def _on_files(self, method: str, asked: dict[str, str]) -> httpx.Response:
        entry = {"entry": {"name": "x", "path": asked.get("path", ""), "type": "FILE_TYPE_DIRECTORY"}}
        if method == "Stat":
            if asked["path"] not in self.there:
                return httpx.Response(404, json={"code": "not_found", "message": "path not found"})
            entry["entry"]["type"] = self.there[asked["path"]]
        elif method == "Move":
            self.moved.append((asked["source"], asked["destination"]))
        elif method == "Remove":
            self.removed.append(asked["path"])
            return httpx.Response(200, json={})
        return httpx.Response(200, json=entry)

    async def _run(self, machine: PretendMachine, request: httpx.Request) -> httpx.Response:
        config = json.loads(request.content[5:])["process"]
        command = config["args"][-1]
        login = base64.b64decode(request.headers.get("authorization", "").removeprefix("Basic ")).decode()
        user = login.rstrip(":") or None
        self.commands.append(command)
        ran = Ran(command, config["envs"], user, machine.memory["hostname"])
        machine.ran.append(ran)
        if self.command_gate is not None:
            await self.command_gate.wait()
        if command in self.deadly:
            machine.end("its process ended")
            raise httpx.ConnectError("connection lost", request=request)
        outcome = self.outcomes.get(command, 0)
        if tries := self.first_outcomes.get(command):
            outcome = tries.pop(0)
        if isinstance(outcome, str):
            end: dict[str, object] = {"error": {"code": outcome, "message": f"no: {outcome}"}}
            return httpx.Response(200, content=_stream(envelope({"event": {"start": {"pid": 7}}}), _last(end)))
        said = [(stream, base64.b64encode(data).decode()) for stream, data in self.output(ran)]
        told: list[dict[str, object]] = [{"data": {stream: text}} for stream, text in said]
        events: list[dict[str, object]] = [
            {"start": {"pid": 7}},
            *told,
            {"end": {"exitCode": outcome, "exited": True, "status": f"exit status {outcome}"}},
        ]
        envelopes = [envelope({"event": event}) for event in events]
        return httpx.Response(200, content=_stream(*envelopes, _last({})))


async def _stream(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def _last(message: dict[str, object]) -> bytes:
    return bytes([END_OF_STREAM]) + envelope(message)[1:]


def ram_roles(memory: Mapping[str, Path]) -> tuple[str, ...]:
    """The base and its layers; all must be there, and nothing else."""
    roles = ("ram", *(f"ram.{number}" for number in range(1, len(memory) - 1)))
    assert {*roles, "device_state"} == set(memory), sorted(memory)
    return roles


def seed_files(directory: Path, driver: str = "qemu") -> Capture:
    """A capture as a build would leave it: a base layer and a memory image."""
    directory.mkdir(parents=True)
    base, ram, devices = directory / "base.qcow2", directory / "ram", directory / "device_state"
    base.write_text("base layer")
    ram.write_text(json.dumps({"seed": "yes"}))
    devices.write_text("devices")
    facts = FACTS.model_copy(update={"driver": driver})
    return Capture(directory, (base,), {"ram": ram, "device_state": devices}, facts)
