"""Hooks: commands that a snapshot brings for the guests restored from its memory. A value; it runs nothing.

They put right what no kernel can: state in user space that must not be the same in two copies, such as a seeded
random generator. ``aenv_run/sandbox_hooks.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from aenv_run.errors import InvalidInput
from aenv_run.types import Model

#: Of each kind. A manifest may come from a stranger.
MAX_HOOKS = 16
MAX_WORDS = 64
#: Of all words of one command.
MAX_CHARACTERS = 16384
USER_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}$"

HookKind: TypeAlias = Literal["on_restore", "on_fork", "on_pause"]


def _bounded(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words[0]:
        raise ValueError("the first word of a hook names a program, it is not empty")
    if any("\0" in word for word in words):
        raise ValueError("a hook has no NUL")
    if sum(map(len, words)) > MAX_CHARACTERS:
        raise ValueError(f"a hook has at most {MAX_CHARACTERS} characters")
    return words


class Hook(Model):
    """One command, without a shell unless it names one. ``user`` None is the snapshot's own (``context``)."""

    command: Annotated[tuple[str, ...], AfterValidator(_bounded)] = Field(min_length=1, max_length=MAX_WORDS)
    user: str | None = Field(None, pattern=USER_PATTERN, description="name, uid or uid:gid")

    @classmethod
    def of(cls, words: str | Sequence[str], *, shell: str = "sh", user: str | None = None) -> Self:
        """Text for the shell with ``-ec``, a list as it is; ``InvalidInput`` says what is wrong with it."""
        command = (shell, "-ec", words) if isinstance(words, str) else tuple(words)
        if not command or (isinstance(words, str) and not words.strip()):
            raise InvalidInput("a hook without any word does nothing", fix="write the command, or leave it out")
        try:
            return cls(command=command, user=user)
        except ValidationError as error:
            reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            raise InvalidInput(f"the hook {' '.join(command)[:80]!r} is not valid: {reason}") from None

    @property
    def words(self) -> str:
        """How people write it: the text of a shell's command, else all words. Not printable as it is."""
        shell = len(self.command) == 3 and self.command[1] == "-ec"
        return self.command[2] if shell else " ".join(self.command)


class Hooks(Model):
    """What runs in a restored guest, in order, after its identity is set and before anybody may use it.

    ``on_fork`` in each child of a fork, then ``on_restore`` in every restored guest, children too. ``on_pause``
    runs in such a guest before it is paused or a snapshot of it is made.
    """

    on_restore: tuple[Hook, ...] = Field((), max_length=MAX_HOOKS)
    on_fork: tuple[Hook, ...] = Field((), max_length=MAX_HOOKS)
    on_pause: tuple[Hook, ...] = Field((), max_length=MAX_HOOKS, description="format 3 only")

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.listed():
            raise ValueError("hooks without any command are no hooks")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without ``on_pause`` the bytes are those of before there was any."""
        fields: dict[str, object] = handler(self)
        if not self.on_pause:
            fields.pop("on_pause", None)
        return fields

    @classmethod
    def of(cls, on_restore: Iterable[Hook], on_fork: Iterable[Hook], on_pause: Iterable[Hook] = ()) -> Self | None:
        """None when there is none; ``InvalidInput`` when there are too many."""
        kinds: dict[HookKind, tuple[Hook, ...]] = {"on_restore": tuple(on_restore), "on_fork": tuple(on_fork)}
        kinds["on_pause"] = tuple(on_pause)
        for kind, hooks in kinds.items():
            if len(hooks) > MAX_HOOKS:
                raise InvalidInput(f"{len(hooks)} commands in {kind}: there are at most {MAX_HOOKS}")
        return cls(**kinds) if any(kinds.values()) else None

    def listed(self) -> list[tuple[HookKind, Hook]]:
        """All of them, in the order in which they run in a child that is paused later."""
        return [*self.to_run(forked=True), *(("on_pause", hook) for hook in self.on_pause)]

    def to_run(self, *, forked: bool) -> list[tuple[HookKind, Hook]]:
        """What a restored guest runs, in order; ``forked``: it is a new child."""
        first: list[tuple[HookKind, Hook]] = [("on_fork", hook) for hook in self.on_fork] if forked else []
        return [*first, *(("on_restore", hook) for hook in self.on_restore)]
