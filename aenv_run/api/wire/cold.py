"""The body of POST /sandboxes-cold."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aenv_run.api.wire.create import AutoResume, CreateV1, NetworkAsked, Timeout
from aenv_run.api.wire.model import Asked, Flag, Strings, Text, Whole


class CreateCold(Asked):
    """As POST /sandboxes, of an ``image``, with sizes."""

    image: Annotated[Text, Field(min_length=1, max_length=512)]
    timeout: Timeout | None = None
    auto_pause: Flag | None = None
    auto_resume: AutoResume | None = None
    secure: Flag | None = None
    allow_internet_access: Flag | None = None
    network: NetworkAsked | None = None
    metadata: Annotated[Strings, Field(max_length=256)] | None = None
    env_vars: Annotated[Strings, Field(max_length=1024)] | None = None
    cpu_count: Annotated[Whole, Field(ge=1, le=64)] | None = None
    memory_mb: Annotated[Whole, Field(ge=128, le=1 << 20)] | None = None
    disk_size_mb: Annotated[Whole, Field(ge=1024, le=1 << 22, multiple_of=1024)] | None = None
    custom_extension_params: dict[str, object] | None = None
    attached_drives: tuple[dict[str, object], ...] | None = None
    extra_boot_args: str | None = None

    def refused(self) -> str | None:
        """The first part that is asked for and cannot be had."""
        parts = {
            "customExtensionParams": self.custom_extension_params,
            "attachedDrives": self.attached_drives,
            "extraBootArgs": self.extra_boot_args,
        }
        own = next((name for name, value in parts.items() if value), None)
        return own or (self.network.refused() if self.network else None)

    def of(self, template: str) -> CreateV1:
        """The request for the template that the image became."""
        own = {"image", "cpu_count", "memory_mb", "disk_size_mb", "allow_internet_access"}
        own |= {"custom_extension_params", "attached_drives", "extra_boot_args"}
        shared = self.model_dump(by_alias=True, exclude_none=True, exclude=own)
        internet = self.allow_internet_access
        return CreateV1.model_validate({**shared, "templateID": template, "allow_internet_access": internet})
