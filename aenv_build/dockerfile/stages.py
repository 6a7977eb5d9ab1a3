"""The stages of a Dockerfile: what each begins from, and which of them the target needs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from aenv_build.dockerfile.source import Dockerfile, Instruction, raw_words
from aenv_build.dockerfile.words import expanded, pairs, split_flags
from aenv_build.language.expansion import Unknown, literal

#: Of this machine, in the words of Docker.
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
PLATFORM = {
    f"{of}{part}": value
    for of in ("TARGET", "BUILD")
    for part, value in (
        ("PLATFORM", f"linux/{ARCHITECTURE}"), ("OS", "linux"), ("ARCH", ARCHITECTURE), ("VARIANT", ""),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One stage. It begins from another one, or from an image; ``scratch`` is that of no file."""

    number: int
    name: str
    line: int
    image: str
    parent: int | None
    instructions: tuple[Instruction, ...]


@dataclass
class Stages:
    """All of them, and the arguments before the first."""

    file: Dockerfile
    given: Mapping[str, str]
    stages: list[Stage] = field(default_factory=list)
    global_arguments: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, file: Dockerfile, given: Mapping[str, str]) -> Stages:
        """Cut it up. ``given``: values of arguments."""
        found = cls(file, given, global_arguments=dict(PLATFORM))
        positions = [at for at, one in enumerate(file.instructions) if one.keyword == "FROM"]
        if not positions:
            raise file.error(1, "there is no FROM", fix="begin with FROM and an image")
        for one in file.instructions[: positions[0]]:
            if one.keyword != "ARG":
                raise file.error(one.line, f"{one.keyword} stands before the first FROM; only ARG may")
            found._argument(one)
        for at, end in zip(positions, [*positions[1:], len(file.instructions)], strict=True):
            found.stages.append(found._stage(file.instructions[at], file.instructions[at + 1 : end]))
        return found

    def find(self, name: str) -> Stage | None:
        """By its name or its number."""
        for stage in reversed(self.stages):
            if stage.name == name.lower() or (name.isdecimal() and stage.number == int(name)):
                return stage
        return None

    def undeclared(self) -> list[str]:
        """A warning for each value that was given and that no ARG asks for."""
        asked: set[str] = set()
        for one in self.file.instructions:
            if one.keyword == "ARG":
                asked |= {name for name, _ in arguments_of(self.file, one)}
        name = self.file.file
        return [f"{name}: --build-arg {each}: no ARG has that name" for each in self.given if each not in asked]

    def _lookup(self, name: str) -> str | None:
        if name in self.global_arguments:
            return self.global_arguments[name]
        return None

    def _argument(self, one: Instruction) -> None:
        for name, value in arguments_of(self.file, one):
            if name in self.given:
                self.global_arguments[name] = self.given[name]
            elif value is not None:
                self.global_arguments[name] = self._text(value, one)
            else:
                self.global_arguments.setdefault(name, None)

    def _text(self, word: str, one: Instruction) -> str:
        try:
            return literal(expanded(word, self.file.escape, self._lookup)) or ""
        except (ValueError, Unknown) as error:
            raise self.file.error(one.line, f"{one.keyword}: {error}") from None

    def _stage(self, one: Instruction, body: tuple[Instruction, ...]) -> Stage:
        flags, rest = split_flags(one.text)
        for name, value in flags:
            wanted = self._text(value, one)
            if name != "platform":
                raise self.file.error(one.line, f"FROM: unknown flag --{name}")
            if wanted.split("/")[:2] != ["linux", ARCHITECTURE]:
                raise self.file.error(
                    one.line, f"FROM: the platform {wanted!r} is not this machine's, linux/{ARCHITECTURE}"
                )
        words = rest.split()
        if len(words) not in {1, 3} or (len(words) == 3 and words[1].upper() != "AS"):
            raise self.file.error(one.line, "FROM takes IMAGE, or IMAGE AS NAME")
        image = self._text(words[0], one)
        if not image:
            raise self.file.error(one.line, f"FROM: {words[0]} is empty", fix="give it: --build-arg NAME=VALUE")
        name = words[2].lower() if len(words) == 3 else ""
        if name and any(stage.name == name for stage in self.stages):
            raise self.file.error(one.line, f"two stages are called {name!r}")
        parent = next((stage.number for stage in self.stages if stage.name == image.lower()), None)
        return Stage(len(self.stages), name, one.line, image, parent, body)


def arguments_of(file: Dockerfile, one: Instruction) -> list[tuple[str, str | None]]:
    """``ARG a b=c``: names, and raw defaults."""
    found: list[tuple[str, str | None]] = []
    if not one.text:
        raise file.error(one.line, "ARG takes a name")
    try:
        if "=" not in one.text:
            return [(name, None) for name in one.text.split()]
        for word in raw_words(one.text, file.escape):
            found += pairs(word, file.escape) if "=" in word else [(word, None)]
    except ValueError as error:
        raise file.error(one.line, f"ARG: {error}") from None
    return found
