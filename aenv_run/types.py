"""Ids and small value types. Each id is its own type, validated when it is made, a ``str`` on the wire."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import core_schema

from aenv_run.errors import InvalidInput
from aenv_run.text import PATH_BYTES, Environment, absolute_path, one_line


class Id(str):
    """A ``str`` that matches ``pattern``; anything else raises ``InvalidInput``."""

    pattern: ClassVar[str]
    what: ClassVar[str]

    def __new__(cls, text: str) -> Self:
        if not re.fullmatch(cls.pattern, text):
            raise InvalidInput(f"{text[:80]!r} is not a valid {cls.what} (it must match {cls.pattern})")
        return super().__new__(cls, text)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[object], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls._from_wire, core_schema.str_schema(pattern=f"^(?:{cls.pattern})$")
        )

    @classmethod
    def _from_wire(cls, text: str) -> Self:
        return cls(text)


class Digest(Id):
    """``sha256:`` and 64 lower-case hex digits: the name of a blob."""

    pattern, what = r"sha256:[0-9a-f]{64}", "digest"

    @property
    def hex(self) -> str:
        """The 64 hex digits alone."""
        return self.removeprefix("sha256:")


class SnapshotId(Id):
    """64 lower-case hex digits: the sha256 of the snapshot's canonical manifest."""

    pattern, what = r"[0-9a-f]{64}", "snapshot id"

    @property
    def short(self) -> str:
        """The first 12 digits, for people."""
        return self[:12]


class StageKey(Id):
    """64 lower-case hex digits: what a build stage's result depends on, hashed."""

    pattern, what = r"[0-9a-f]{64}", "stage key"


class SandboxId(Id):
    """20 lower-case letters and digits, the first a letter: fits one DNS label."""

    pattern, what = r"[a-z][a-z0-9]{19}", "sandbox id"

    @classmethod
    def new(cls) -> SandboxId:
        """A fresh random id (about 98 bits)."""
        alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
        return cls("s" + "".join(secrets.choice(alphabet) for _ in range(19)))


class Name(Id):
    """A catalog name such as ``swe-task``."""

    pattern, what = r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?", "snapshot name"


class Tag(Id):
    """A moving label of a name such as ``latest``; never starts with a digit, so it is never a version."""

    pattern, what = r"[A-Za-z_][A-Za-z0-9._-]{0,62}", "tag"


class Architecture(Id):
    """Debian's word for the instruction set."""

    pattern, what = r"amd64|arm64", "architecture"


class Model(BaseModel):
    """Frozen, strict about unknown keys: the base of every value that crosses a file or a wire."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MachineSpec(Model):
    """What a sandbox's machine has. Part of what a memory snapshot is bound to."""

    cpus: int = Field(1, ge=1, le=64, description="virtual CPUs")
    memory_mib: int = Field(512, ge=128, le=1 << 20, description="guest memory in MiB")
    disk_mib: int = Field(4096, ge=64, le=1 << 24, description="size of the root disk in MiB")


class Context(Model):
    """How commands run in a sandbox unless they say otherwise (as an image's config does)."""

    env: Environment = Field(default_factory=dict)
    workdir: Annotated[str, Field(max_length=PATH_BYTES), AfterValidator(absolute_path)] = "/"
    user: Annotated[str, Field(min_length=1, max_length=256), AfterValidator(one_line)] = "root"
