"""A supervisor that is loaded and waits to be copied: a fork takes 2 ms, a start of Python with its modules 40.

One process per driver. It ends when the driver's process ends, and with it the machines that are to end then; all
others live on. Standard library only on its side, which is ``main``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket

from aenv_run.disk_mount import MS_SLAVE, mount
from aenv_run.drivers import gvisor_start, gvisor_supervisor

REQUEST_BYTES = 1 << 20
CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
assert gvisor_supervisor  # loaded here, so that no copy has to


def main(descriptor: int) -> None:
    """Make a copy for each request, and answer with its process id, until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    connection = socket.socket(fileno=descriptor)
    own = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            answer_to, log = descriptors
            _become(json.loads(data), answer_to, log, own)
        for one in descriptors:
            os.close(one)
        connection.send(str(pid).encode())


def _become(
    request: dict[str, str | bool | list[str] | dict[str, str]], answer_to: int, log: int, parent: int
) -> None:
    """The process in front of a machine: it makes the namespaces and waits for the supervisor in them."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _redirect(log)
        environment = request["environment"]
        assert isinstance(environment, dict)
        os.environ.clear()
        os.environ.update(environment)
        if request["ephemeral"]:
            _end_with_parent()
            if os.getppid() != parent:
                return
        directory, argv = str(request["directory"]), request["argv"]
        assert isinstance(argv, list)
        os.chdir(directory)
        _checked(_LIBC.unshare(CLONE_NEWPID | CLONE_NEWNS))
        mount("none", "/", "none", MS_SLAVE)  # mounts of the host still come in, none goes out
        pid = os.fork()
        if pid == 0:
            _end_with_parent()
            gvisor_start.main(directory, answer_to, argv)
            code = 0
            return
        os.close(answer_to)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException as error:  # noqa: BLE001 - the last thing it does
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code if code >= 0 else 128 - code)


def _redirect(log: int) -> None:
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(empty)
    os.close(log)


def _end_with_parent() -> None:
    _checked(_LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
