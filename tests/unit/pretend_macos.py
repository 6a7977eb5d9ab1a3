"""Runs ``aenv`` as where nothing of Linux alone is: ``python tests/unit/pretend_macos.py ARGUMENTS… [; …]``.

It is no macOS: what is missing there is missing here, but what macOS does otherwise is not known by it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import sysconfig
import types

#: Of modules that macOS has too: what it has not.
MISSING: dict[types.ModuleType, tuple[str, ...]] = {
    os: (
        *("pidfd_open", "memfd_create", "sched_getaffinity", "sched_setaffinity", "sched_setscheduler"),
        *("copy_file_range", "pipe2", "eventfd", "splice", "setns", "unshare", "posix_fallocate", "posix_fadvise"),
        *("getxattr", "setxattr", "listxattr", "removexattr", "fdatasync", "getrandom", "O_PATH", "O_TMPFILE"),
        *("O_DIRECT", "O_NOATIME", "P_PIDFD", "RWF_NOWAIT", "CLONE_NEWNS", "MFD_CLOEXEC", "waitid", "accept4"),
    ),
    select: ("epoll",),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT"),
    socket: ("AF_NETLINK", "AF_PACKET", "AF_VSOCK", "SO_PEERCRED", "SO_BINDTODEVICE", "SOCK_CLOEXEC"),
}


def without_linux() -> None:
    """From now on in this process."""
    sysconfig.get_config_vars()  # of the Python that runs, in a file that is named after its platform
    sys.platform = "darwin"
    for module, names in MISSING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    if hasattr(os, "process_cpu_count"):  # since Python 3.13, which makes it of what the platform has
        os.process_cpu_count = os.cpu_count
    ctypes.CDLL = ctypes.PyDLL = _NoFunctions  # type: ignore[assignment, misc]
    # What Python for macOS asks about proxies, of a machine without any.
    proxies = types.ModuleType("_scproxy")
    proxies._get_proxy_settings = dict  # type: ignore[attr-defined]
    proxies._get_proxies = dict  # type: ignore[attr-defined]
    sys.modules["_scproxy"] = proxies
    sys.modules["trio"] = None  # type: ignore[assignment]  # optional, and of kqueue there
    sys.addaudithook(_refuse)


class _NoFunctions:
    """A C library that has none of the functions that are asked of it."""

    def __init__(self, *given: object, **named: object) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"symbol not found: {name}")


def _refuse(event: str, given: tuple[object, ...]) -> None:
    if event == "open" and isinstance(given[0], str) and given[0].startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "no such file here", given[0])


if __name__ == "__main__":
    without_linux()
    from aenv_run.cli.command import run

    for argv in " ".join(sys.argv[1:]).split(" ; "):
        if code := run(argv.split()):
            sys.exit(code)
