"""Secrets of a build: given by name, to the steps that name them, for their time only.

Never in a layer, key, log, event or error: steps find them in their environment and under /run/secrets, which is
memory, and every value is taken out of what is shown.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from aenv_build.language.document import nearest
from aenv_build.planning.files import chunks, one_file_tar
from aenv_build.planning.plan import Plan
from aenv_build.running.redact import MIN_LENGTH
from aenv_run.errors import AenvError, InvalidInput, RecipeError
from aenv_run.guest import Guest

FOLDER = "/run/secrets"
#: One environment variable cannot be larger than 128 KiB.
MAX_BYTES = 64 << 10


@dataclass(frozen=True)
class Secrets:
    """Values by name; those that nobody gave are absent. Their repr shows names alone."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(
        cls, options: Sequence[str], declared: Collection[str], environ: Mapping[str, str] | None = None
    ) -> Self:
        """From ``NAME=FILE`` and ``NAME=env:VARIABLE``; of others the variable of that name."""
        values = os.environ if environ is None else environ
        found = {name: values[name] for name in declared if values.get(name)}
        for option in options:
            name, separator, source = option.partition("=")
            if not separator or not source:
                # What follows may be the secret itself: it is not repeated.
                raise InvalidInput(f"--secret {name}: write NAME=FILE or NAME=env:VARIABLE")
            if name not in declared:
                raise InvalidInput(
                    f"--secret {name}: the recipe has no secret of that name ({nearest(name, declared)})",
                    fix=f"declare it: 'secrets: [{name}]'",
                )
            found[name] = _from(name, source, values)
        return cls({name: _checked(name, value) for name, value in found.items()})

    def of(self, names: Collection[str]) -> dict[str, str]:
        """Those of a step."""
        return {name: self.values[name] for name in names if name in self.values}

    def missing(self, plan: Plan, needed: Collection[str]) -> RecipeError | None:
        """The first that a step which is to run names and nobody gave."""
        for stage in plan.stages.values():
            for position, name in enumerate(stage.step.secrets if stage.id in needed else ()):
                if name not in self.values:
                    return plan.source.error(
                        ("steps", stage.index, "secrets", position),
                        f"the step {stage.id!r} needs the secret {name!r}, which is not given",
                        fix=f"set {name} in the environment, or --secret {name}=FILE or {name}=env:VARIABLE",
                    )
        return None


@asynccontextmanager
async def lend_secrets(guest: Guest, values: Mapping[str, str], user: str) -> AsyncIterator[Mapping[str, str]]:
    """As files of ``user`` below /run/secrets while the context lasts; the environment is the caller's part."""
    if not values:
        yield values
        return
    try:
        for name, value in values.items():
            await guest.put_archive(FOLDER, chunks(one_file_tar(name, value.encode(), 0o400)), user=user)
        yield values
    except BaseException:
        with suppress(AenvError):
            await guest.remove(FOLDER, user="root")
        raise
    await guest.remove(FOLDER, user="root")


def _from(name: str, source: str, environ: Mapping[str, str]) -> str:
    if source.startswith("env:"):
        variable = source.removeprefix("env:")
        if not environ.get(variable):
            raise InvalidInput(f"--secret {name}: the variable {variable} is not set")
        return environ[variable]
    try:
        with Path(source).expanduser().open("rb") as file:
            data = file.read(MAX_BYTES + 2)
    except OSError as error:
        raise InvalidInput(f"--secret {name}: cannot read {source}: {error.strerror}") from error
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"--secret {name}: {source} is not UTF-8 text") from error


def _checked(name: str, value: str) -> str:
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:  # the environment's bytes as they are; the error of Python would show some
        raise InvalidInput(f"the secret {name} is not UTF-8 text", fix="give it as base64") from None
    if size_bytes > MAX_BYTES or "\0" in value:
        raise InvalidInput(f"the secret {name} is larger than {MAX_BYTES >> 10} KiB, or holds a NUL")
    if len(value.strip()) < MIN_LENGTH:
        raise InvalidInput(
            f"the secret {name} has fewer than {MIN_LENGTH} characters: it could not be kept out of the output",
            fix="give a longer value",
        )
    return value
