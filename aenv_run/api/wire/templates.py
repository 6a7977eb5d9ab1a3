"""Bodies of the template endpoints."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from aenv_run.api.wire.model import Asked, Flag, Text, Told, Whole
from aenv_run.api.wire.sandboxes import ENVD_VERSION

Status = Literal["waiting", "building", "ready", "error"]
Level = Literal["debug", "info", "warn", "error"]
Line = Annotated[Text, Field(max_length=65536)]
TagText = Annotated[Text, Field(min_length=1, max_length=128)]


class TemplateAsked(Asked):
    """POST /v3/templates."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    tags: tuple[TagText, ...] | None = Field(None, max_length=32)
    cpu_count: Whole | None = Field(None, ge=1, le=64)
    memory_mb: Whole | None = Field(None, ge=128, le=1 << 20)
    min_free_disk_mb: Whole | None = Field(None, alias="minFreeDiskMb", ge=0, le=1 << 24)
    team_id: str | None = Field(None, alias="teamID", max_length=256)


class RegistryLogin(Asked):
    """``fromImageRegistry``: only a user and a password are supported."""

    type: str = Field(max_length=32)
    username: str | None = Field(None, max_length=4096)
    password: str | None = Field(None, max_length=65536, repr=False)
    aws_access_key_id: str | None = Field(None, alias="awsAccessKeyId", repr=False)
    aws_secret_access_key: str | None = Field(None, alias="awsSecretAccessKey", repr=False)
    aws_region: str | None = Field(None, alias="awsRegion")
    service_account_json: str | None = Field(None, alias="serviceAccountJson", repr=False)


class StepAsked(Asked):
    """One step of a build."""

    type: str = Field(min_length=1, max_length=32)
    args: tuple[Line, ...] = Field((), max_length=1000)
    files_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    force: Flag | None = None
    force_upload: Flag | None = None


class BuildAsked(Asked):
    """POST /v2/templates/{templateID}/builds/{buildID}."""

    from_image: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    from_template: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    from_image_registry: RegistryLogin | None = None
    force: Flag | None = None
    steps: tuple[StepAsked, ...] | None = Field(None, max_length=400)
    start_cmd: Line | None = None
    ready_cmd: Line | None = None

    @model_validator(mode="after")
    def _one_base(self) -> Self:
        if self.from_image is not None and self.from_template is not None:
            raise ValueError("give fromImage or fromTemplate, not both")
        if self.from_image_registry is not None and self.from_template is not None:
            raise ValueError("fromImageRegistry is for fromImage: a template comes from no registry")
        return self


class TagsAsked(Asked):
    """POST /templates/tags."""

    target: Annotated[Text, Field(min_length=1, max_length=256)]
    tags: tuple[TagText, ...] = Field(min_length=1, max_length=32)


class UntagAsked(Asked):
    """DELETE /templates/tags."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    tags: tuple[TagText, ...] = Field(min_length=1, max_length=32)


class VisibilityAsked(Asked):
    """PATCH of a template."""

    public: Flag | None = None


class TemplateMade(Told):
    """The answer of POST /v3/templates."""

    template_id: str
    build_id: str
    public: bool
    names: tuple[str, ...]
    tags: tuple[str, ...]
    aliases: tuple[str, ...]


class FileUpload(Told):
    """Where to put an archive."""

    present: bool
    url: str | None = None
    headers: dict[str, str] | None = None


class LogEntry(Told):
    """A line of a build's log."""

    timestamp: datetime
    message: str
    level: Level
    step: str | None = None


class Reason(Told):
    """Why a build failed. ``step``: ``base``, ``finalize``, or the number of the step."""

    message: str
    step: str | None = None
    log_entries: tuple[LogEntry, ...] | None = None


class BuildInfo(Told):
    """How far a build is, and its log from ``logsOffset`` on."""

    template_id: str
    build_id: str
    status: Status
    logs: tuple[str, ...]
    log_entries: tuple[LogEntry, ...]
    reason: Reason | None = None


class BuildLogs(Told):
    """A part of a build's log."""

    logs: tuple[LogEntry, ...]


class TemplateBuild(Told):
    """One build, in a template's list."""

    build_id: str
    status: Status
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None = None
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    envd_version: str = ENVD_VERSION


class Template(Told):
    """A row of the list. What is not counted here is 0 or null, and said so in docs/templates.md."""

    template_id: str
    build_id: str
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    public: bool = False
    aliases: tuple[str, ...]
    names: tuple[str, ...]
    created_at: datetime
    updated_at: datetime
    created_by: None = None
    last_spawned_at: None = None
    spawn_count: int = 0
    build_count: int
    envd_version: str = ENVD_VERSION
    build_status: Status


class TemplateWithBuilds(Template):
    """One template."""

    builds: tuple[TemplateBuild, ...]


class AliasReply(Told):
    """Whose name it is."""

    template_id: str
    public: bool = False


class TagRow(Told):
    """One tag of a template."""

    tag: str
    build_id: str
    created_at: datetime


class AssignedTags(Told):
    """The answer of POST /templates/tags."""

    tags: tuple[str, ...]
    build_id: str
