"""Where a repository on an S3-compatible store is: its URL, read and written. Never a secret in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from aenv_run.errors import InvalidInput

Addressing = Literal["auto", "path", "virtual"]
Writers = Literal["many", "one"]

FORM = "s3://BUCKET/PREFIX?region=REGION&endpoint=URL&addressing=path&writers=one&profile=NAME"
_PARAMETERS = ("region", "endpoint", "addressing", "writers", "profile")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


@dataclass(frozen=True)
class S3Place:
    """One prefix of one bucket. ``writers`` one: only this home writes, so that no conditional write is needed.

    ``region`` None: what the environment or the profile says. ``endpoint`` None: Amazon's, or what they say.
    """

    bucket: str
    prefix: str = ""
    region: str | None = None
    endpoint: str | None = None
    addressing: Addressing = "auto"
    writers: Writers = "many"
    profile: str | None = None

    @classmethod
    def parse(cls, url: str) -> S3Place:
        """Of ``s3://bucket/prefix?…``. Errors repeat nothing that could be a secret."""
        try:
            parts = urlsplit(url)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise InvalidInput("the URL of the repository cannot be read", fix=f"write {FORM}") from None
        if "@" in parts.netloc:
            raise InvalidInput(
                "the URL of the repository has a user or a password in it",
                fix="give credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a process",
            )
        if not _BUCKET.fullmatch(parts.netloc):
            raise InvalidInput(f"{parts.netloc[:80]!r} is no name of a bucket", fix=f"write {FORM}")
        prefix = parts.path.strip("/")
        if prefix and not _PREFIX.fullmatch(prefix):
            raise InvalidInput(
                f"{prefix[:80]!r} is no prefix of a repository",
                fix="its parts are letters, digits, '.', '_' and '-', with '/' between",
            )
        if parts.fragment:
            raise InvalidInput("the URL of the repository has a '#'", fix=f"write {FORM}")
        return cls(parts.netloc, prefix, **_options(pairs))  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """The same place always has the same URL."""
        values = {
            "region": self.region,
            "endpoint": self.endpoint,
            "addressing": None if self.addressing == "auto" else self.addressing,
            "writers": None if self.writers == "many" else self.writers,
            "profile": self.profile,
        }
        query = urlencode({name: value for name, value in values.items() if value}, safe=":/")
        path = f"/{self.prefix}" if self.prefix else ""
        return f"s3://{self.bucket}{path}" + (f"?{query}" if query else "")

    @property
    def server(self) -> str:
        """Where it is asked, as far as the URL or the environment say; "" is Amazon."""
        named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        return self.endpoint or ("" if "@" in named else named)

    def __str__(self) -> str:
        """For messages: the bucket, the prefix and the server."""
        place = f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        return f"{place} at {self.server}" if self.server else place


def _options(pairs: list[tuple[str, str]]) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in pairs:
        if name not in _PARAMETERS:
            known = ", ".join(_PARAMETERS)
            raise InvalidInput(
                f"the URL of the repository has a parameter {name[:40]!r}", fix=f"there are {known}; no secrets"
            )
        if name in options or not value:
            raise InvalidInput(f"{name} is empty or given twice in the URL of the repository", fix=f"write {FORM}")
        options[name] = value
    _require(options, "region", r"[a-z0-9-]{1,64}", "a region, such as eu-central-1")
    _require(options, "profile", r"[A-Za-z0-9._-]{1,128}", "a profile of ~/.aws/config")
    _require(
        options, "addressing", "path|virtual|auto", "path (endpoint/bucket/key) or virtual (bucket.endpoint/key)"
    )
    _require(options, "writers", "one|many", "many, or one where the store has no conditional writes")
    if "endpoint" in options:
        options["endpoint"] = _endpoint(options["endpoint"])
    return options


def _require(options: dict[str, str], name: str, pattern: str, meaning: str) -> None:
    if name in options and not re.fullmatch(pattern, options[name]):
        raise InvalidInput(
            f"{name} in the URL of the repository is {options[name][:40]!r}", fix=f"it is {meaning}"
        )


def _endpoint(text: str) -> str:
    fix = "write endpoint=https://HOST:PORT, without user and password"
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidInput("the endpoint in the URL of the repository is none", fix=fix)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
