"""Settings of ``aenv serve``: from a file (TOML), and above it from options and variables of the command."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from aenv_run.errors import InvalidInput
from aenv_run.types import Model

CONFIG_VARIABLE = "AENV_SERVE_CONFIG"
_DOMAIN = re.compile(
    r"(?=.{1,180}$)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*"
)


class Settings(Model):
    """What a server is told. Every field is a key of the file, and most an option of the command."""

    host: str = Field("127.0.0.1", min_length=1, max_length=255, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    domains: tuple[str, ...] = Field((), max_length=16, description="{port}-{sandbox}.{domain} reaches a sandbox")
    templates: dict[str, str] = Field(
        {"code-interpreter-v1": "code-interpreter"},
        max_length=1000,
        description="what a name means that the catalog does not have; SDKs ask for some by themselves",
    )
    max_sandboxes: int | None = Field(None, ge=1, description="with a machine at the same time; None: no limit")
    on_stop: Literal["keep", "pause"] = Field("keep", description="what becomes of running sandboxes at a stop")
    grace_s: float = Field(30, ge=0, le=3600, description="for requests that run when it is told to stop")
    header_s: float = Field(30, gt=0, le=3600, description="for a client to send the head of a request")
    body_s: float = Field(60, gt=0, le=3600, description="for a client to send the body of a control call")
    max_body_bytes: int = Field(1 << 20, ge=1024, le=1 << 30, description="of a control call")
    max_requests: int = Field(4096, ge=1, description="answered at the same time; more are told 503")
    public_url: str | None = Field(
        None, pattern=r"^https?://[^\s?#]+$", description="how callers reach this server; default: as they did"
    )
    images: dict[str, str] = Field(
        default_factory=dict, description="what a name of fromImage means: docker://, oci:, snapshot:, archive:"
    )
    registries: tuple[str, ...] = Field(
        (), max_length=1000, description="hosts, with a port if any, that fromImage may name; default: all"
    )
    default_image: str = Field("e2bdev/base", min_length=1, max_length=512, description="without fromImage")
    max_builds: int = Field(2, ge=1, le=64, description="of templates at the same time; more wait")
    template_cpus: int = Field(2, ge=1, le=64, description="of a template that does not say it")
    template_memory_mib: int = Field(1024, ge=128, le=1 << 20, description="of a template that does not say it")
    template_disk_mib: int = Field(8192, ge=64, le=1 << 22, description="of a template; minFreeDiskMb is added")
    template_internet: bool = Field(True, description="whether steps of a build reach the internet")
    template_memory_snapshot: bool = Field(True, description="templates are launched from memory, in milliseconds")
    max_upload_bytes: int = Field(4 << 30, ge=1 << 20, description="of one archive of a build")
    max_uploads_bytes: int = Field(20 << 30, ge=1 << 20, description="of all that are kept")
    metrics_every_s: float = Field(
        0, ge=0, le=3600, description="ask all sandboxes what they use, and keep it for an hour; 0: never"
    )
    log_format: Literal["text", "json"] = "text"

    @field_validator("domains")
    @classmethod
    def _canonical(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(domain.strip().rstrip(".").lower() for domain in domains))
        for domain in found:
            if not _DOMAIN.fullmatch(domain):
                raise ValueError(f"{domain[:80]!r} is not a domain")
        return found

    @property
    def domain(self) -> str | None:
        """The one that clients are told."""
        return self.domains[0] if self.domains else None

    @classmethod
    def read(cls, path: Path | None = None, **options: object) -> Settings:
        """Those of the file (``path``, else $AENV_SERVE_CONFIG), with ``options`` that are not None above them."""
        named = str(path) if path is not None else os.environ.get(CONFIG_VARIABLE)
        found: dict[str, object] = {}
        if named:
            try:
                with Path(named).open("rb") as file:
                    found = tomllib.load(file)
            except (OSError, tomllib.TOMLDecodeError) as error:
                raise InvalidInput(
                    f"the settings {named} cannot be read: {error}", fix="see docs/server.md"
                ) from error
        given = {name: value for name, value in options.items() if value is not None}
        try:
            return cls.model_validate({**found, **given})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidInput(
                f"setting {where}: {first['msg']}", fix="see docs/server.md for its keys"
            ) from error
