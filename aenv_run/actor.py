"""Who does it, for records that people read later: a claim, proven by nothing."""

from __future__ import annotations

import getpass
import os
import socket

ACTOR_VARIABLE = "AENV_ACTOR"
MAX_CHARACTERS = 64


def actor() -> str:
    """``$AENV_ACTOR`` (a CI's user, say), or the user and the host; at most 64 characters, printable."""
    named = os.environ.get(ACTOR_VARIABLE)
    if not named:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a uid without a name
            user = f"uid-{os.getuid()}"
        named = f"{user}@{socket.gethostname().partition('.')[0]}"
    return "".join(c if c.isprintable() else "?" for c in named)[:MAX_CHARACTERS]
