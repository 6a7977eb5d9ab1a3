"""Which server commands and the SDK speak to, and the file in which ``aenv auth`` keeps it."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from aenv_run.errors import HostRefused, InvalidInput, Unauthenticated, from_os

URL_VARIABLE = "AENV_API_URL"
KEY_VARIABLE = "AENV_API_KEY"
DEFAULT_URL = "http://localhost:8000"
MAX_FILE_BYTES = 64 << 10
#: Either says that what is meant is on this machine.
LOCAL_VARIABLES = ("AENV_HOME", "AENV_REPOSITORY")


@dataclass(frozen=True)
class ServerAddress:
    """An ``aenv serve`` and the key for it. ``url`` has no slash at its end; the key is never shown."""

    url: str
    api_key: str = field(repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str) -> Self:
        """``InvalidInput`` for what is no URL of a server, or could be no key; the key is not in the message."""
        if not re.fullmatch(r"[A-Za-z0-9._~-]{32,256}", api_key):
            raise InvalidInput("this is no API key", fix="a key has 32 to 256 characters of A-Z a-z 0-9 . _ ~ -")
        return cls(parse_url(url), api_key)

    @property
    def in_the_open(self) -> bool:
        """Whether the key would cross a network unencrypted."""
        return not self.url.startswith("https://") and not is_loopback(self.url)


def parse_url(url: str) -> str:
    """The URL in its one form; ``InvalidInput`` for what could hold a secret or is none of a server."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    except ValueError:
        valid = False
    if not valid or "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidInput(
            "the URL of the server cannot be read, or could hold a secret",
            fix="write http://HOST:PORT or https://HOST, without user, password, query and fragment",
        )
    if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]+", parts.netloc) or not re.fullmatch(
        r"(?:/+[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*/*", parts.path
    ):
        raise InvalidInput("the URL of the server has characters that none has", fix="write https://HOST/PATH")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def is_loopback(url: str) -> bool:
    """Whether it is this machine itself, so that no proxy and no network is between."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


def credentials_file() -> Path:
    """``~/.config/aenv/credentials``, or where $XDG_CONFIG_HOME says."""
    configured = os.environ.get("XDG_CONFIG_HOME")
    return Path(configured or Path("~/.config").expanduser()) / "aenv" / "credentials"


def chosen_server(*, local: bool = False) -> ServerAddress | None:
    """The server that is meant; None: this machine. docs/remote.md says why in this order.

    ``local`` first, then $AENV_API_URL, then what is set for this machine ($AENV_HOME, $AENV_REPOSITORY), then
    the server of ``aenv auth``, then this machine. $AENV_API_KEY alone chooses nothing: a server has it set too.
    """
    url, key = os.environ.get(URL_VARIABLE), os.environ.get(KEY_VARIABLE)
    if local:
        return None
    if url:
        if os.environ.get("AENV_REPOSITORY"):
            raise InvalidInput(
                f"{URL_VARIABLE} names a server, which has its own repository, and AENV_REPOSITORY another",
                fix="unset one of them",
            )
        return server_at(url)
    if any(os.environ.get(name) for name in LOCAL_VARIABLES):
        return None
    saved = load()
    return ServerAddress.parse(saved.url, key) if saved and key else saved


def server_at(url: str) -> ServerAddress:
    """That one, with the key of $AENV_API_KEY, or the one that ``aenv auth`` keeps for it."""
    return ServerAddress.parse(url, os.environ.get(KEY_VARIABLE) or _saved_key(parse_url(url)))


def _saved_key(url: str) -> str:
    """A key is given only to the server that it was entered for."""
    saved = load()
    if saved is None or saved.url != url:
        raise Unauthenticated(
            f"there is no API key for {url}", fix=f"set {KEY_VARIABLE}, or run `aenv auth {url}`"
        )
    return saved.api_key


def load() -> ServerAddress | None:
    """What ``aenv auth`` wrote; None when there is nothing. ``HostRefused`` when others may read it."""
    path = credentials_file()
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise from_os(error, "cannot read the credentials") from error
    if mode & 0o077:
        raise HostRefused(f"{path} holds a key that others may read", fix=f"chmod 600 {path}")
    return _parse(data, path)


def _parse(data: bytes, path: Path) -> ServerAddress:
    import tomllib

    try:
        found = tomllib.loads(data.decode())
        url, key = found["url"], found["api_key"]
        if len(data) <= MAX_FILE_BYTES and isinstance(url, str) and isinstance(key, str):
            return ServerAddress.parse(url, key)
    except (ValueError, KeyError, InvalidInput):
        pass
    raise InvalidInput(f"{path} is damaged: it has no url and api_key", fix="`aenv auth` writes it anew")


def save(address: ServerAddress) -> Path:
    """Keep it, for this user alone; where."""
    path = credentials_file()
    text = f"url = {json.dumps(address.url)}\napi_key = {json.dumps(address.api_key)}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(prefix=".credentials-", dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise from_os(error, "cannot keep the credentials") from error
    return path


def forget() -> bool:
    """Remove the file; False when there was none."""
    try:
        credentials_file().unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise from_os(error, "cannot remove the credentials") from error
    return True
