"""Who else may change a repository that is a directory."""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from dataclasses import dataclass

from aenv_run.store.posix import PosixStore


@dataclass(frozen=True)
class Concern:
    """What is unusual, and what to do if it is not meant."""

    detail: str
    fix: str


def concerns(store: object) -> tuple[Concern, ...]:
    """Of a directory that everybody may write, or that is another user's (not root's); none for other stores.

    Whoever may write can remove or replace names and leases; blobs and manifests are told by their digests.
    """
    if not isinstance(store, PosixStore):
        return ()
    try:
        root = store.root.stat()
    except OSError:
        return ()
    place, found = shlex.quote(str(store.root)), []
    if root.st_mode & stat.S_IWOTH:
        found.append(
            Concern(
                f"every user of this machine may write the repository {store.root}: "
                f"its mode is {stat.S_IMODE(root.st_mode):04o}",
                f"chmod o-w {place}; several users can share a group: chgrp GROUP {place} && chmod 2770 {place}",
            )
        )
    if root.st_uid not in (0, os.geteuid()):
        found.append(
            Concern(
                f"the repository {store.root} belongs to another user, {_name(root.st_uid)}, "
                "who can replace its names",
                "use it only if you trust that user, or with AENV_REQUIRE_SIGNATURE (docs/signing.md); "
                f"else: chown -R {_name(os.geteuid())} {place}",
            )
        )
    return tuple(found)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
