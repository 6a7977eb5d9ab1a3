"""The recipe language as models. schemas/recipe.schema.json is generated from them; docs/recipe.md explains."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from aenv_build.language.recipe_values import (
    Env,
    Matrix,
    Paths,
    RecipeModel,
    Seconds,
    SecretName,
    SizeMib,
    StepId,
    User,
    Words,
    Workdir,
    image_name,
    short_form,
)
from aenv_build.language.verbs import Apt, CacheMount, Copy, Git, Mkdir, Pip, Ready, Run, Verify, Write, Written
from aenv_run.errors import InvalidInput
from aenv_run.hooks import MAX_HOOKS, Hook, Hooks
from aenv_run.text import Labels
from aenv_run.types import Name, Tag


class Debootstrap(RecipeModel):
    """Debian or a derivative from its package archive, made by mmdebstrap."""

    suite: str = Field(pattern=r"^[a-z][a-z0-9.-]{0,63}$", description="such as bookworm")
    variant: Literal["minbase", "apt", "essential", "important", "standard"] = "minbase"
    packages: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")], ...] = ()
    mirror: str | None = Field(None, pattern=r"^https?://[^\s]+$", description="default: mmdebstrap's own")


class Base(RecipeModel):
    """Where the first state comes from: exactly one key."""

    image: Annotated[str, AfterValidator(image_name)] | None = Field(
        None, description="a container image: docker://HOST/NAME:TAG, oci:FOLDER:TAG or docker-archive:FILE"
    )
    debootstrap: Debootstrap | None = None
    archive: str | None = Field(None, description="a root file system: .tar, .tar.gz, .tar.xz or .tar.zst")
    snapshot: str | None = Field(None, description="a snapshot's name, name:version, name:tag or id")
    empty: Literal[True] | None = Field(None, description="true: no file at all, as Docker's scratch")


class Machine(RecipeModel):
    """The machine that steps run in and that outputs are launched with."""

    cpus: int | None = Field(None, ge=1, le=64, description="default 1, or the base snapshot's")
    memory: SizeMib | None = Field(None, ge=128, le=1 << 20, description="default 512MiB, or the base snapshot's")
    disk: SizeMib | None = Field(None, ge=64, le=1 << 24, description="default 4GiB, or the base snapshot's")
    internet: bool = Field(False, description="whether steps may reach the network outside")


class Step(RecipeModel):
    """One step: exactly one verb, and what it stands on."""

    VERBS: ClassVar[tuple[str, ...]] = (
        "run", "copy", "write", "mkdir", "apt", "pip", "git", "env", "workdir", "user", "verify", "start",
        "checkpoint", "base",
    )  # fmt: skip
    #: Verbs for which a machine runs and after which a snapshot is committed.
    STATES: ClassVar[frozenset[str]] = frozenset(
        {"run", "copy", "write", "mkdir", "apt", "pip", "git", "start", "checkpoint", "base"}
    )
    #: Verbs whose command may be given something for its time. Not start: what it is given would live on.
    GIVEN: ClassVar[frozenset[str]] = frozenset({"run", "apt", "pip", "git", "verify"})
    #: Verbs whose command may have cache mounts.
    CACHED: ClassVar[frozenset[str]] = frozenset({"run", "apt", "pip", "git"})
    #: Verbs that run a command, which may take too long.
    TIMED: ClassVar[frozenset[str]] = frozenset({"run", "apt", "pip", "git", "verify", "start"})

    id: StepId = Field(description="default: the verb and the position, such as run-3")
    needs: tuple[str, ...] | None = Field(None, description="default: the step before; []: the base")
    run: Annotated[Run, short_form("command")] | None = None
    copy_: Copy | None = Field(None, alias="copy")
    write: Written | None = Field(None, description="one file, or a mapping of paths and contents")
    mkdir: Annotated[Mkdir, short_form("path")] | None = None
    apt: Annotated[Apt, short_form("packages")] | None = None
    pip: Annotated[Pip, short_form("packages")] | None = None
    git: Git | None = None
    env: Env | None = None
    expand: bool = Field(False, description="with env only: $NAME and ${NAME} are what they were before")
    workdir: Workdir | None = None
    user: User | None = None
    verify: Annotated[Verify, short_form("run")] | None = None
    start: Annotated[Run, short_form("command")] | None = None
    checkpoint: Literal[True] | None = Field(None, description="true: the state with memory, as it has booted")
    base: Base | None = Field(None, description="another base, for the steps that stand on this one")
    ready: Annotated[Ready, short_form("command")] | None = Field(None, description="with start only")
    timeout: Seconds | None = Field(None, description="of a command; default 1h")
    secrets: tuple[SecretName, ...] = Field((), description="secrets of the recipe that its command may read")
    cache: tuple[Annotated[CacheMount, short_form("path")], ...] = Field(
        (), max_length=16, description="directories that its command finds again in later builds"
    )
    retry: int | None = Field(None, ge=0, le=10, description="how often to try again; default --retry, or never")
    ttl: Seconds | None = Field(None, description="a result that is older does not count, such as 7d")
    salt: str | None = Field(None, description="counts in the key; another one makes the result anew")

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema of a step as written: short forms, exactly one verb, an id that may be left out."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        words = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        for verb in ("run", "start", "verify", "ready"):
            schema["properties"][verb]["anyOf"][:0] = words
        schema["properties"]["mkdir"]["anyOf"].insert(0, {"type": "string"})
        for verb in ("apt", "pip"):
            schema["properties"][verb]["anyOf"].insert(0, {"type": "array", "items": {"type": "string"}})
        schema.pop("required", None)
        schema["oneOf"] = [{"required": [verb]} for verb in cls.VERBS]
        return schema

    @property
    def verb(self) -> str:
        """The one verb of the step."""
        values: dict[str, object] = {"copy": self.copy_, "run": self.run, "env": self.env, "workdir": self.workdir}
        values |= {"user": self.user, "verify": self.verify, "start": self.start, "write": self.write}
        values |= {"apt": self.apt, "pip": self.pip, "git": self.git, "checkpoint": self.checkpoint}
        values |= {"mkdir": self.mkdir, "base": self.base}
        return next(verb for verb in self.VERBS if values[verb] is not None)

    @property
    def files_written(self) -> tuple[Write, ...]:
        """What ``write`` makes, its short form spelt out."""
        if isinstance(self.write, Write):
            return (self.write,)
        return tuple(Write(to=to, content=content) for to, content in (self.write or {}).items())


class HookCommand(RecipeModel):
    """A command for guests restored from an output's memory. Text is run by the shell with -ec."""

    command: Words
    shell: str = "sh"
    user: User | None = Field(None, description="default: the output's own")

    @model_validator(mode="after")
    def _valid(self) -> Self:
        try:
            self.hook()
        except InvalidInput as error:
            raise ValueError(error.message) from None
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema as written: the short forms too."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        long_form = dict(schema)
        schema.clear()
        schema["anyOf"] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, long_form]
        return schema

    def hook(self) -> Hook:
        """As a snapshot holds it."""
        return Hook.of(self.command, shell=self.shell, user=self.user)


Commands = Annotated[
    tuple[Annotated[HookCommand, short_form("command")], ...],
    Field(max_length=MAX_HOOKS),
]


class Output(RecipeModel):
    """A state that gets a name."""

    from_: str | None = Field(None, alias="from", description="default: the last step that makes a state")
    name: Name | None = Field(None, description="default: the recipe's name")
    tags: tuple[Tag, ...] = ("latest",)  # type: ignore[assignment]
    memory: bool | None = Field(None, description="with RAM; default: only where a step was started")
    labels: Labels = Field(default_factory=dict)
    on_restore: Commands = Field((), description="run in every guest restored from its memory, before it is used")
    on_fork: Commands = Field((), description="run in every child of a fork, before on_restore")
    on_pause: Commands = Field((), description="run in every such guest before a pause or a snapshot of it")

    def hooks(self) -> Hooks | None:
        """Its hooks, if it has any."""
        kinds = (self.on_restore, self.on_fork, self.on_pause)
        return Hooks.of(*(map(HookCommand.hook, commands) for commands in kinds))


class Recipe(RecipeModel):
    """A validated recipe, vars filled in."""

    version: Literal[1]
    name: Name
    include: Paths = Field((), description="fragments: their vars, env and steps come before the recipe's own")
    vars: dict[str, str] = Field(default_factory=dict)
    matrix: Matrix | None = Field(None, description="one build for each combination of values")
    base: Base
    machine: Machine = Machine()
    env: Env = Field(default_factory=dict)
    secrets: tuple[SecretName, ...] = Field((), description="names; values come from who builds")
    steps: tuple[Step, ...] = Field((), max_length=500)
    outputs: tuple[Output, ...] = Field((Output(),), min_length=1, max_length=64)
