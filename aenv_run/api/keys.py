"""The server's secrets: the API key that callers must send, and the seed of the tokens of sandboxes' ports."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aenv_run import durable
from aenv_run.errors import AenvError, InvalidInput, from_os
from aenv_run.node_socket import FileLock
from aenv_run.paths import Home

KEY_VARIABLE = "AENV_API_KEY"
_KEY = re.compile(r"[A-Za-z0-9._~-]{32,256}")
_SEED = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Keys:
    """Never logged, never shown: ``repr`` says nothing."""

    api_key: str
    token_seed: bytes
    generated: Path | None = None  # where a key that was just made lies

    def __repr__(self) -> str:
        return "Keys(...)"

    def matches(self, given: bytes) -> bool:
        """Whether it is the API key, in a time that does not depend on how much of it is right."""
        return hmac.compare_digest(hashlib.sha256(given).digest(), hashlib.sha256(self.api_key.encode()).digest())

    def traffic_token(self, sandbox_id: str) -> str:
        """What opens the ports of a sandbox that are not public. The same after every restart."""
        return hmac.new(self.token_seed, f"traffic:{sandbox_id}".encode(), "sha256").hexdigest()


def open_keys(home: Home) -> Keys:
    """Blocking: $AENV_API_KEY, else the home's; what is missing is made once, mode 0600."""
    directory = home.secrets
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise from_os(error, "the secrets of this home cannot be kept") from error
    lock = FileLock(home.locks / "secrets.lock")
    while not lock.acquire():  # another server makes them now: a moment
        time.sleep(0.02)
    try:
        seed, _ = _kept(directory / "token-seed", _SEED, lambda: secrets.token_hex(32))
        if (named := os.environ.get(KEY_VARIABLE)) is not None:
            if not _KEY.fullmatch(named):
                raise InvalidInput(
                    f"{KEY_VARIABLE} is not a key: it needs 32 to 256 letters, digits or . _ ~ -",
                    fix="leave it out, and the server makes one",
                )
            return Keys(named, bytes.fromhex(seed))
        path = directory / "api-key"
        key, made = _kept(path, _KEY, lambda: "e2b_" + secrets.token_hex(32))
        return Keys(key, bytes.fromhex(seed), path if made else None)
    finally:
        lock.release()


def _kept(path: Path, form: re.Pattern[str], make: Callable[[], str]) -> tuple[str, bool]:
    """What the file holds, and whether it was made now. One that is damaged is never replaced in silence."""
    try:
        with path.open("rb") as file:
            text = file.read(1024).decode("ascii", "replace").strip()
    except FileNotFoundError:
        text = make()
        durable.replace(path, text.encode() + b"\n")
        return text, True
    except OSError as error:
        raise from_os(error, "a secret of this home cannot be read") from error
    if not form.fullmatch(text):
        raise AenvError(f"{path} does not hold what it should", fix="remove it, and the server makes a new one")
    return text, False
