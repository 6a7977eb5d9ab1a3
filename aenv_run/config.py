"""Settings of a node that come from the command line or the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

from aenv_run.cache_limit import DEFAULT_LIMIT_BYTES
from aenv_run.errors import InvalidInput, Unsupported
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.store.posix import PosixStore

REPOSITORY_VARIABLE = "AENV_REPOSITORY"
CACHE_VARIABLE = "AENV_CACHE_MIB"
WARM_VARIABLE = "AENV_FIRST_BOOT_WARMS"
ON_DEMAND_VARIABLE = "AENV_ON_DEMAND"
FILL_VARIABLE = "AENV_BACKGROUND_FILL"
PATIENCE_VARIABLE = "AENV_STORE_PATIENCE_S"
DEFAULT_PATIENCE_S = 30.0


def repository_directory(url: str | None, home: Home) -> Path:
    """Where the repository is, absolute: ``url``, $AENV_REPOSITORY or the home's own."""
    return _directory(url or os.environ.get(REPOSITORY_VARIABLE) or str(home.repository))


def open_repository(url: str | None, home: Home) -> Repository:
    """The committed repository: ``url`` (a path or ``posix:///path``), $AENV_REPOSITORY, or the home's own."""
    return Repository(PosixStore(repository_directory(url, home)))


def cache_limit_bytes() -> int:
    """What the cache of blobs may keep on disk for itself: $AENV_CACHE_MIB, or 20 GiB."""
    text = os.environ.get(CACHE_VARIABLE)
    if not text:
        return DEFAULT_LIMIT_BYTES
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InvalidInput(f"{CACHE_VARIABLE} is {text[:40]!r}", fix="write a whole number of MiB, such as 20480")
    return int(text) << 20


def first_boot_warms() -> bool:
    """Whether the first boot of a snapshot without memory leaves an image. $AENV_FIRST_BOOT_WARMS=off: no."""
    return _switch(WARM_VARIABLE, "on")


def loads_on_demand() -> bool:
    """Whether disk layers that are not local are read while they are used. $AENV_ON_DEMAND=off: fetched first."""
    return _switch(ON_DEMAND_VARIABLE, "on")


def fills_idle() -> bool:
    """Whether the rest of a layer read on demand is fetched while nobody reads. $AENV_BACKGROUND_FILL=on: yes."""
    return _switch(FILL_VARIABLE, "off")


def store_patience_s() -> float:
    """How long a store may fail before a guest that reads gets an I/O error: $AENV_STORE_PATIENCE_S, or 30."""
    text = os.environ.get(PATIENCE_VARIABLE) or str(DEFAULT_PATIENCE_S)
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text):
        raise InvalidInput(f"{PATIENCE_VARIABLE} is {text[:40]!r}", fix="write seconds, such as 30")
    return float(text)


def _switch(variable: str, default: str) -> bool:
    text = os.environ.get(variable) or default
    if text not in ("on", "off"):
        raise InvalidInput(f"{variable} is {text[:40]!r}", fix="write on or off")
    return text == "on"


def _directory(url: str) -> Path:
    scheme, separator, rest = url.partition("://")
    if not separator:
        if re.fullmatch(r"[a-z][a-z0-9+]*:.*", url):
            raise InvalidInput(f"{url!r} is no repository", fix="write a path or posix:///an/absolute/path")
        return Path(url).expanduser().absolute()
    if scheme != "posix":
        raise Unsupported(f"repositories at {scheme}:// are not supported", fix="use a path or posix:///path")
    if not rest.startswith("/"):
        raise InvalidInput(f"{url!r} has no absolute path", fix="write posix:///an/absolute/path")
    return Path(rest)
