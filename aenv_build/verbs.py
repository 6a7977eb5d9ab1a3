"""What each verb of a step takes, as models."""

from __future__ import annotations

from pydantic import Field

from aenv_build.recipe_values import Env, RecipeModel, RelativeOrAbsolute, SandboxPath, Seconds, User, Words


class Run(RecipeModel):
    """A command. Text is run by the shell with -ec; a list is run as it is, without a shell."""

    command: Words
    shell: str = "sh"
    user: User | None = None
    workdir: SandboxPath | None = None
    env: Env = Field(default_factory=dict)
    timeout: Seconds | None = Field(None, description="default 1h")


class FromStep(RecipeModel):
    """Files that another step left in its state."""

    step: str
    path: SandboxPath


class Copy(RecipeModel):
    """Files into the sandbox. A directory's content goes to ``to``; a file becomes ``to``, or goes in ``to/``."""

    from_: str | FromStep = Field(alias="from")
    to: RelativeOrAbsolute
    user: User | None = None


class Verify(RecipeModel):
    """A check on a throwaway fork: nothing it does is kept, and the build fails if it does not hold."""

    run: Words
    exit_code: int = Field(0, ge=0, le=255)
    junit: SandboxPath | None = Field(None, description="a JUnit XML report that the command writes")
    failed: tuple[str, ...] | None = Field(None, description="exactly these tests (classname::name) fail")
    shell: str = "sh"
    user: User | None = None
    workdir: SandboxPath | None = None
    env: Env = Field(default_factory=dict)
    timeout: Seconds | None = Field(None, description="default 1h")


class Ready(RecipeModel):
    """When a started command counts as up: a command that exits 0, or a TCP port that accepts."""

    command: Words | None = None
    port: int | None = Field(None, ge=1, le=65535)
