"""What each verb of a step takes, as models."""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Sequence
from typing import Annotated

from pydantic import Discriminator, Field, Tag

from aenv_build.language.recipe_values import (
    AbsoluteFilePath,
    AbsoluteWorkdir,
    AptPackage,
    CachePath,
    CopyMode,
    Env,
    FileMode,
    FilePath,
    GitRef,
    GitUrl,
    LocalUrl,
    RecipeModel,
    RelativeOrAbsolute,
    Requirement,
    SandboxPath,
    Seconds,
    Sources,
    StepId,
    Url,
    User,
    Words,
)


class Run(RecipeModel):
    """A command. Text is run by the shell with -ec; a list is run as it is, without a shell."""

    command: Words
    shell: str = "sh"
    user: User | None = None
    workdir: AbsoluteWorkdir | None = None
    env: Env = Field(default_factory=dict)
    timeout: Seconds | None = Field(None, description="default 1h")


class FromStep(RecipeModel):
    """Files that another step left in its state."""

    step: str
    path: SandboxPath


class Copy(RecipeModel):
    """Files into the sandbox. A directory's content goes to ``to``; a file becomes ``to``, or goes in ``to/``.

    Where ``to`` is a directory already, a file goes into it. Several sources go into it, each by its own name.
    """

    from_: str | Sources | FromStep = Field(alias="from")
    to: RelativeOrAbsolute
    user: User | None = None
    mode: CopyMode | None = Field(None, description="permissions of all that is copied; default: 0644, 0755")
    unpack: bool = Field(
        False, description="from is a tar (also .gz, .bz2, .xz): its content goes to the folder 'to'"
    )
    ignore: str | None = Field(None, min_length=1, description="a file of rules, instead of .aenvignore")

    @property
    def paths(self) -> tuple[str, ...]:
        """What is taken of the host."""
        if isinstance(self.from_, FromStep):
            return ()
        return (self.from_,) if isinstance(self.from_, str) else self.from_

    @property
    def mode_bits(self) -> int | None:
        """The permissions that all files get."""
        return int(self.mode, 8) if self.mode is not None else None


class Mkdir(RecipeModel):
    """A directory with those above it, made where it is missing."""

    path: RelativeOrAbsolute
    user: User | None = Field(None, description="who it belongs to if it is made; default: the context's")


class Write(RecipeModel):
    """A file whose content stands in the recipe."""

    to: FilePath
    content: str
    executable: bool = False
    mode: FileMode | None = Field(None, description="default 0644, or 0755 if executable")
    user: User | None = None

    @property
    def mode_bits(self) -> int:
        """The permissions of the file."""
        return int(self.mode, 8) if self.mode is not None else 0o755 if self.executable else 0o644


def _form_of_write(value: object) -> str:
    whole = isinstance(value, Write) or (isinstance(value, dict) and ("to" in value or "content" in value))
    return "one file" if whole else "path: content"


Written = Annotated[
    Annotated[Write, Tag("one file")]
    | Annotated[dict[AbsoluteFilePath, str], Field(min_length=1), Tag("path: content")],
    Discriminator(_form_of_write),
]


class Apt(RecipeModel):
    """Packages of Debian or Ubuntu, installed as root. What was fetched to install them is removed again."""

    packages: tuple[AptPackage, ...] = Field(min_length=1)
    update: bool = Field(True, description="fetch the lists of packages first")
    recommends: bool = Field(False, description="install what the packages recommend, too")


class Pip(RecipeModel):
    """Packages of Python, installed by the context's user. Nothing of pip's cache stays."""

    packages: tuple[Requirement, ...] = ()
    requirements: str | None = Field(None, description="a requirements file, relative to the recipe")
    python: str = Field("python3", min_length=1, description="the interpreter that gets them")
    venv: SandboxPath | None = Field(None, description="a virtual environment that gets them; made if missing")
    index: Url | None = Field(None, description="the package index, instead of PyPI")


class Git(RecipeModel):
    """A repository at one commit, as the context's user has it."""

    url: GitUrl = Field(description="https, ssh or git; or a path or file:// inside the sandbox")
    commit: str | None = Field(None, pattern=r"^[0-9a-f]{40}$", description="the whole id: what is built is this")
    ref: GitRef | None = Field(None, description="a branch or tag; it moves, so the step says ttl or salt")
    to: RelativeOrAbsolute
    depth: int = Field(1, ge=0, le=1_000_000, description="how many commits of history; 0: all")
    submodules: bool = False

    @property
    def is_remote(self) -> bool:
        """Whether it is fetched from outside the sandbox."""
        return not self.url.startswith(("/", "file://"))


class CacheMount(RecipeModel):
    """A directory that outlives the machines of a home's builds, in no layer."""

    path: CachePath
    id: StepId | None = Field(None, description="shared by all recipes that name it; default: the recipe's own")


class Verify(RecipeModel):
    """A check on a throwaway fork: nothing it does is kept, and the build fails if it does not hold."""

    run: Words
    exit_code: int = Field(0, ge=0, le=255)
    junit: SandboxPath | None = Field(None, description="a JUnit XML report that the command writes")
    failed: tuple[str, ...] | None = Field(None, description="exactly these tests (classname::name) fail")
    shell: str = "sh"
    user: User | None = None
    workdir: AbsoluteWorkdir | None = None
    env: Env = Field(default_factory=dict)
    timeout: Seconds | None = Field(None, description="default 1h")


class Ready(RecipeModel):
    """When a started command counts as up: a command exits 0, a TCP port accepts, or a URL answers."""

    command: Words | None = None
    port: int | None = Field(None, ge=1, le=65535)
    url: LocalUrl | None = Field(None, description="asked inside the sandbox; up when the status is 200 to 399")


def places_overlap(paths: Sequence[str]) -> tuple[str, str] | None:
    """Two of the directories of which one is in the other."""
    clean = sorted(posixpath.normpath(path) + "/" for path in paths)
    return next(((a[:-1], b[:-1]) for a, b in itertools.pairwise(clean) if b.startswith(a)), None)
