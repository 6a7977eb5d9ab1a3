"""Settings of a node that come from the command line or the environment."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from aenv_run.cache_limit import DEFAULT_LIMIT_BYTES
from aenv_run.credentials import ServerAddress
from aenv_run.errors import InvalidInput, Unsupported
from aenv_run.garbage.unheld import UNHELD_VARIABLE
from aenv_run.paths import Home
from aenv_run.printable import printable
from aenv_run.repository import Repository
from aenv_run.signatures import required
from aenv_run.store import Store
from aenv_run.store.posix import PosixStore
from aenv_run.store.s3_place import S3Place

REPOSITORY_VARIABLE = "AENV_REPOSITORY"
CACHE_VARIABLE = "AENV_CACHE_MIB"
PACK_VARIABLE = "AENV_PACK_AFTER_H"
#: So that what a daily job uses is never packed.
DEFAULT_PACK_AFTER_H = 48
#: Schemes that aenv_run/store/other.py reads; it is imported when one is used.
OTHERS = ("http", "https", "gs", "az")
WARM_VARIABLE = "AENV_FIRST_BOOT_WARMS"
ON_DEMAND_VARIABLE = "AENV_ON_DEMAND"
FILL_VARIABLE = "AENV_BACKGROUND_FILL"
PATIENCE_VARIABLE = "AENV_STORE_PATIENCE_S"
DEFAULT_PATIENCE_S = 30.0


def repository_name(url: str | None, home: Home) -> str:
    """Which repository that is: an absolute path, or a URL; equal ones are the same. It has no secret.

    It is ``url``, $AENV_REPOSITORY, or the home's own.
    """
    chosen = url or os.environ.get(REPOSITORY_VARIABLE) or str(home.repository)
    if _scheme(chosen) == "s3":
        return S3Place.parse(chosen).url
    if _scheme(chosen) in OTHERS:
        from aenv_run.store.other import parse_place

        return parse_place(chosen)
    return str(_directory(chosen))


def repository_directory(url: str | None, home: Home) -> Path | None:
    """Where the repository is on this machine; None when it is elsewhere."""
    found = repository_name(url, home)
    return None if _scheme(found) else Path(found)


def same_repository(one: str, other: str) -> bool:
    """Whether two of ``repository_name`` are one; paths also through links."""
    if _scheme(one) or _scheme(other):
        return one == other
    return os.path.realpath(one) == os.path.realpath(other)


def open_repository(url: str | None, home: Home) -> Repository:
    """The repository at ``repository_name(url, home)``. Nothing is asked of it yet.

    Whose signature it takes to launch or to build on a snapshot of it says $AENV_REQUIRE_SIGNATURE, and whether
    what it cannot hold there is used all the same $AENV_ALLOW_UNHELD=on.
    """
    repository = Repository(_store(repository_name(url, home), home))
    repository.trust = required()
    repository.allow_unheld = _switch(UNHELD_VARIABLE, "off")
    return repository


def server_repository(server: ServerAddress) -> Repository:
    """The repository of a server, as ``open_repository`` gives one of this machine."""
    from aenv_run.store.remote import RemoteStore

    repository = Repository(RemoteStore(server))
    repository.trust = required()
    return repository


def _store(url: str, home: Home) -> Store:
    if _scheme(url) == "s3":
        from aenv_run.store.s3 import S3Store  # boto3 takes a while to import

        place = S3Place.parse(url)
        name = hashlib.sha256(f"{place.endpoint} {place.bucket}/{place.prefix}".encode()).hexdigest()[:16]
        return S3Store(place, lock=home.locks / f"store-{name}")
    if _scheme(url) in OTHERS:
        from aenv_run.store.other import open_place

        return open_place(url)
    return PosixStore(Path(url))


def cache_limit_bytes() -> int:
    """What the cache of blobs may keep on disk for itself: $AENV_CACHE_MIB, or 20 GiB."""
    text = os.environ.get(CACHE_VARIABLE)
    if not text:
        return DEFAULT_LIMIT_BYTES
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InvalidInput(f"{CACHE_VARIABLE} is {text[:40]!r}", fix="write a whole number of MiB, such as 20480")
    return int(text) << 20


def pack_after_s() -> float | None:
    """How long a raw blob is unused before the node packs it: $AENV_PACK_AFTER_H, or 48 hours. ``off``: None."""
    text = os.environ.get(PACK_VARIABLE) or str(DEFAULT_PACK_AFTER_H)
    if text == "off":
        return None
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise InvalidInput(f"{PACK_VARIABLE} is {text[:40]!r}", fix="write a whole number of hours, or off")
    return int(text) * 3600.0


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


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


def _directory(url: str) -> Path:
    scheme, separator, rest = url.partition("://")
    if not separator:
        if re.fullmatch(r"[a-z][a-z0-9+]*:.*", url):
            raise InvalidInput(f"{url!r} is no repository", fix="write a path or posix:///an/absolute/path")
        return Path(url).expanduser().absolute()
    if scheme != "posix":
        what = f"repositories at {printable(scheme)[:40]}:// are not supported"
        raise Unsupported(what, fix="use a path, posix:///path or s3://bucket/prefix?region=…")
    if not rest.startswith("/"):
        raise InvalidInput(f"{url!r} has no absolute path", fix="write posix:///an/absolute/path")
    return Path(rest)
