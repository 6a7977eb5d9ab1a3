"""Process 1 of a sandbox's own pid and mount namespace: its disk, runsc and its ways in. Killing it ends all.

The driver writes ``plan.json`` and starts ``gvisor_start``, which starts the storage daemon and this. One line
of JSON on an inherited descriptor tells how it went; then it answers requests on ``control.sock``, a line of JSON
each way. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path

from aenv_run import disk_mount
from aenv_run.disk_mount import DiskError, JsonValue
from aenv_run.drivers import gvisor_disk, gvisor_sentry, gvisor_slot
from aenv_run.drivers.gvisor_children import Children
from aenv_run.drivers.gvisor_disk import LostWritesError, MountedDisk
from aenv_run.drivers.gvisor_forward import Forwarder
from aenv_run.drivers.gvisor_gate import Gate, GateError
from aenv_run.drivers.gvisor_start import Storage

TYPE_CHECKING = False  # see aenv_run/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aenv_run.drivers.gvisor_plan import Plan

PLAN, CONTROL, EXIT, CONSOLE = "plan.json", "control.sock", "exit.json", "console.log"
BUNDLE, PID_FILE, PACK = "bundle", "sentry.pid", "disk.pack"
#: A place for runsc's own state that every proc has, that nobody uses and that goes away with the namespace.
STATE = "/proc/driver"
NET_SYSCTL = "/proc/sys/net"
CONTAINER = "aenv"
SENTRY_SOCKET = f"{STATE}/runsc-{CONTAINER}.sock"
CONSOLE_LIMIT_BYTES = 1 << 20
#: Written at the start, so that the reason of the end has its place on a disk that is full then.
EXIT_BYTES = 4096
REQUEST_BYTES = 65536
START_S, CHECKPOINT_S, CALL_S, DRAIN_S = 60.0, 600.0, 60.0, 10.0

Json = dict[str, JsonValue]


class _Fields:
    """A ``Plan`` as it was written: dataclasses take 10 ms to load."""

    def __init__(self, fields: dict[str, object]) -> None:
        self.__dict__.update(fields)


class Failure(Exception):
    """What is told to the driver; ``kind`` chooses its error."""

    def __init__(self, message: str, kind: str = "failed") -> None:
        super().__init__(message)
        self.kind = kind


class Supervisor:
    """One machine. Requests are served one at a time; ``ended`` is set when the machine is over."""

    def __init__(self, plan: Plan, storage: Storage | None) -> None:
        """Without ``storage`` there is no disk to mount: the guest writes into memory, and tells what."""
        self._plan, self._storage = plan, storage
        self._children = Children()
        self._disk: MountedDisk | None = None
        self._forwarder: Forwarder | None = None
        self._gate = Gate(plan.router_netns, plan.guest_address) if plan.router_netns else None
        self._busy = threading.Lock()
        self._paused = False
        self._reason = ""
        self.ended = threading.Event()

    # -- start ---------------------------------------------------------------------------------------------

    def start(self) -> Json:
        """Bring the machine up; what the driver must know of it."""
        if self._storage is not None:  # first: it counts for a process with one thread
            disk_mount.unshare_mounts()
        self._mounts()
        Path(EXIT).write_bytes(b" " * EXIT_BYTES)
        self._children.start_reaping()
        if self._plan.known_version:
            with self._held_back():
                pid = self._spawn_runsc()
                try:
                    self._prepare()
                except BaseException:
                    os.kill(pid, 9)
                    raise
        else:
            self._prepare()
            pid = self._spawn_runsc()
        self._await_runsc(pid)
        if self._plan.bridge:
            self._forwarder = Forwarder(self._children, [*self._runsc("exec"), CONTAINER, *self._plan.bridge])
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(CONTROL).unlink(missing_ok=True)
        listener.bind(CONTROL)
        listener.listen(8)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return {"port": self._forwarder.port if self._forwarder else 0}

    def _prepare(self) -> None:
        """What the sandbox finds: its disk, its network."""
        if self._storage is not None:
            self._disk = MountedDisk(self._children, self._storage, self._plan.top)
            self._children.adopt(self._disk.pid, self._storage_ended)
            self._disk.mount(check=self._plan.check_disk, keep="" if self._plan.restore else self._plan.keep)
        if self._plan.netns:
            self._put_addresses()

    @contextlib.contextmanager
    def _held_back(self) -> Iterator[None]:
        """runsc loads for 30 ms, reads its bundle, and waits for this lock before it does anything else."""
        lock = os.open(
            f"{STATE}/{CONTAINER}_sandbox:{CONTAINER}.lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _mounts(self) -> None:
        disk_mount.mount(
            "proc", "/proc", "proc", disk_mount.MS_NOSUID | disk_mount.MS_NODEV | disk_mount.MS_NOEXEC
        )
        disk_mount.mount("tmpfs", STATE, "tmpfs", disk_mount.MS_NOSUID | disk_mount.MS_NODEV, "mode=0700")
        if self._plan.hide_net_sysctl:
            # runsc takes this directory's existence as a sign of the host's own network namespace and refuses.
            disk_mount.mount("tmpfs", NET_SYSCTL, "tmpfs", disk_mount.MS_RDONLY, "size=4k")

    def _put_addresses(self) -> None:
        """runsc takes them off the interface at every start; a slot that is new has them."""
        plan = self._plan
        wanted = (plan.device, plan.guest_address, plan.gateway)
        if gvisor_slot.inside(plan.netns, lambda: gvisor_slot.is_configured(*wanted)):
            return
        argv = ["nsenter", f"--net={self._plan.netns}", "ip", "-force", "-batch", "-"]
        code, said = self._children.run(argv, timeout_s=CALL_S, text=self._plan.addresses)
        if code != 0:
            raise Failure(f"the network slot cannot be given its addresses: {said[-500:]}")

    def _runsc(self, *arguments: str) -> list[str]:
        return [*self._plan.runsc, "--root", STATE, *arguments]

    def _spawn_runsc(self) -> int:
        how = ["restore", "-image-path", self._plan.restore] if self._plan.restore else ["run"]
        argv = self._runsc(*how, "-detach", "-bundle", BUNDLE, "-pid-file", PID_FILE, CONTAINER)
        console = _append(CONSOLE)
        empty = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:  # the machine keeps these descriptors: files, as pipes would end with their reader
            return self._children.spawn(argv, stdin=empty, stdout=console, stderr=console)
        finally:
            os.close(console)
            os.close(empty)

    def _await_runsc(self, pid: int) -> None:
        code = self._children.wait(pid, START_S)
        if code != 0:
            how = "restore" if self._plan.restore else "run"
            raise Failure(f"runsc {how} failed (code {code}): {_head(CONSOLE)}")
        self._children.adopt(int(Path(PID_FILE).read_text()), self._sentry_ended)

    # -- end -----------------------------------------------------------------------------------------------

    def _storage_ended(self, code: int) -> None:
        self._over(f"its disk service ended (code {code}): {gvisor_disk.said()}")

    def _sentry_ended(self, code: int) -> None:
        if code != 0 and _count(self._plan.out_of_memory_file, "oom_kill") > 0:
            self._over("out of memory: the host ended the whole sandbox at its memory limit")
        elif code != 0 and _count(self._plan.process_limit_file, "max") > 0:
            self._over("too many processes: the sandbox's kernel could start no more at its limit and gave up")
        elif code < 0:
            self._over(f"its kernel process was ended by signal {-code}")
        else:
            self._over(f"its first process ended: the guest shut down (code {code})")

    def _over(self, reason: str) -> None:
        self._reason = self._reason or reason
        self.ended.set()

    def _end_if_lost(self) -> None:
        if self._disk is not None and self._disk.lost:
            self._over(self._disk.lost)

    def stay(self) -> None:
        """Return when the machine is over. Until then a guest cannot fill the host's disk by its console."""
        while not self.ended.wait(1.0):
            with contextlib.suppress(OSError):
                if Path(CONSOLE).stat().st_size > CONSOLE_LIMIT_BYTES:
                    os.truncate(CONSOLE, 0)
            if self._disk is not None:
                with contextlib.suppress(DiskError):
                    self._disk.look()
                self._end_if_lost()
        with Path(EXIT).open("r+b") as file:
            file.write(json.dumps({"reason": self._reason}).encode())

    # -- requests ------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One request, with a descriptor of the directory to capture into: here its path may mean another."""
        with connection, contextlib.suppress(OSError):
            data, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 1)
            try:
                while data and not data.endswith(b"\n"):
                    data += connection.recv(REQUEST_BYTES)
                request = json.loads(data or b"{}")
                if descriptors:
                    os.set_inheritable(descriptors[0], False)
                    request["directory"] = f"/proc/1/fd/{descriptors[0]}"
                answer = json.dumps(self._answer(request)).encode() + b"\n"
            finally:  # before the answer: whoever has it may unmount what was captured into
                for descriptor in descriptors:
                    os.close(descriptor)
            try:
                connection.sendall(answer)
            finally:  # not before: all of this process ends with it
                self._end_if_lost()

    def _answer(self, request: Json) -> Json:
        try:
            if request.get("op") == "state":
                top = self._disk.top if self._disk else ""
                return {"paused": self._paused, "top": top, "over": self.ended.is_set()}
            with self._busy:
                return self._act(request)
        except Failure as error:
            deleted: list[JsonValue] = [*self._deleted_files()] if error.kind == "checkpoint" else []
            return {"error": str(error), "kind": error.kind, "deleted": deleted}
        except gvisor_sentry.NotDisconnectedError as error:
            return {"error": str(error), "kind": "busy" if error.answered else "unreachable"}
        except LostWritesError as error:
            return {"error": str(error), "kind": "dead"}
        except (DiskError, GateError, OSError) as error:
            return {"error": str(error), "kind": "failed"}

    def _act(self, request: Json) -> Json:
        match request.get("op"):
            case "pause":
                self._set_paused(True)
            case "resume":
                self._set_paused(False)
                self._let_in()
            case "capture":
                return {"stopped_ms": self._capture(request) if self._disk else self._capture_packed(request)}
            case _:
                raise Failure(f"unknown request {request.get('op')}")
        return {}

    def _set_paused(self, paused: bool) -> None:
        if paused == self._paused:
            return
        if gvisor_sentry.call(SENTRY_SOCKET, "Pause" if paused else "Resume"):
            self._paused = paused
            return
        word = "pause" if paused else "resume"
        code, said = self._children.run(self._runsc(word, CONTAINER), timeout_s=CALL_S)
        if code != 0:
            raise Failure(f"runsc {word} failed (code {code}): {said[-1500:]}")
        self._paused = paused

    def _capture(self, request: Json) -> float:
        """Memory, then the disk (a checkpoint still writes times of files), then on. Sealing is the last step."""
        assert self._disk is not None
        was_paused, with_memory = self._paused, bool(request["memory"])
        node = request["node"]
        assert isinstance(node, dict)
        disk, done = self._disk, False
        disk.sync()  # most of it is written while the machine still runs
        started = time.perf_counter()
        try:
            if with_memory:
                self._let_go(str(request["host"]), int(str(request["port"])), lambda: disk.add(node))
            else:
                disk.add(node)
            started = time.perf_counter()
            self._set_paused(True)
            if with_memory:
                self._checkpoint(str(request["directory"]))
            disk.sync()
            disk.seal(node)
            done = True
        finally:
            if not done:
                disk.drop(node)
            self._set_paused(was_paused or (done and not request["keep_running"]))
            if not self._paused:  # else whoever resumes it
                self._let_in()
        return (time.perf_counter() - started) * 1000

    def _capture_packed(self, request: Json) -> float:
        """All of the guest stands still while a process of ours there tells what its disk holds; then memory."""
        from aenv_run.drivers.gvisor_pack import Packer, PackError  # where the disk is mounted nobody needs it

        was_paused, with_memory = self._paused, bool(request["memory"])
        packer = Packer(self._children, self._runsc("exec"), self._runsc("kill"), CONTAINER, SENTRY_SOCKET)
        done = False
        started = time.perf_counter()
        try:
            if with_memory:
                self._let_go(str(request["host"]), int(str(request["port"])))
            self._set_paused(False)
            stopped = packer.stopped(self._plan.stopped)
            started = time.perf_counter()
            packer.stop()
            try:
                packer.pack(self._plan.pack, PACK, self._plan.pack_bytes)
                self._set_paused(True)  # nobody runs between the one and the other
            finally:
                packer.go_on(stopped)
            if with_memory:
                self._checkpoint(str(request["directory"]))
            done = True
        except PackError as error:
            raise Failure(str(error)) from error
        finally:
            self._set_paused(was_paused or (done and not request["keep_running"]))
            if not self._paused:  # else whoever resumes it
                self._let_in()
        return (time.perf_counter() - started) * 1000

    def _let_go(self, host: str, port: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """End every connection into the guest: one in the image, or its bridge's descriptors, and that is lost.
        ``meanwhile`` is done on the way, where there is time to wait.

        Only a running guest can. One that is paused runs for these milliseconds: whoever paused it may have
        talked to it just before, and gVisor's own network accepts connections during a pause.
        """
        self._set_paused(False)
        with gvisor_sentry.connect(host, port, DRAIN_S) as connection:
            if self._gate is not None:
                self._gate.close(meanwhile)
            else:
                meanwhile()
            gvisor_sentry.disconnect(connection, DRAIN_S)
        if self._forwarder is not None and not self._forwarder.close_gate(DRAIN_S):
            raise Failure(f"connections into the sandbox did not end in {DRAIN_S:g} s; it is as it was", "busy")

    def _let_in(self) -> None:
        """Undo ``_let_go``, whatever came of it. What fails here must not hide that, nor undo a capture."""
        if self._forwarder is not None:
            self._forwarder.open_gate()
        if self._gate is not None:
            try:
                self._gate.open()
            except (GateError, OSError) as error:
                self._over(f"its network could not be opened again: {error}")

    def _deleted_files(self) -> list[str]:
        """Files of the disk that are open and deleted, the usual reason of a failure; none while paused."""
        if self._paused:
            return []
        _, said = self._children.run([*self._runsc("exec"), CONTAINER, *self._plan.deleted], timeout_s=CALL_S)
        return said.splitlines()

    def _checkpoint(self, directory: str) -> None:
        if self._plan.known_version:
            with contextlib.suppress(gvisor_sentry.NoAnswerError):
                if said := gvisor_sentry.checkpoint(SENTRY_SOCKET, directory):
                    raise Failure(said[:2000], "checkpoint")
                return
        argv = self._runsc(
            "checkpoint", "-image-path", directory, "-compression", "none", "-leave-running", CONTAINER
        )
        code, said = self._children.run(argv, timeout_s=CHECKPOINT_S)
        if code != 0:
            raise Failure(said[:2000] or f"runsc checkpoint failed (code {code})", "checkpoint")


def _count(path: str, event: str) -> int:
    """What a control group's file counted of ``event``; 0 without a file."""
    try:
        words = Path(path).read_text().split()
        return int(dict(zip(words[::2], words[1::2], strict=False)).get(event, "0"))
    except (OSError, ValueError):
        return 0


def _append(name: str) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _head(name: str) -> str:
    """What a program that failed said first: a panic's reason, not the end of its stacks."""
    try:
        said = Path(name).read_bytes()[:65536].decode(errors="replace")
    except OSError:
        said = ""
    return said.partition("\ngoroutine ")[0].strip()[:2000] or "it said nothing"


def run(answer_to: int, storage: Storage | None) -> None:
    """Run the machine that ``plan.json`` describes until it is over; its storage daemon, if any, was started."""
    answer: Json
    supervisor: Supervisor | None = None
    try:
        plan: Plan = json.loads(Path(PLAN).read_bytes(), object_hook=_Fields)
        supervisor = Supervisor(plan, storage)
        answer = supervisor.start()
    except Failure as error:
        answer = {"error": str(error), "kind": error.kind}
    except DiskError as error:
        answer = {"error": str(error), "kind": "corrupt" if error.corrupt else "failed"}
    except (OSError, ValueError, TypeError) as error:
        answer = {"error": f"{type(error).__name__}: {error}", "kind": "failed"}
    os.write(answer_to, json.dumps(answer).encode() + b"\n")
    os.close(answer_to)
    if supervisor is not None and "error" not in answer:
        supervisor.stay()
