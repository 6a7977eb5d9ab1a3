"""What holds after an instruction of a stage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from aenv_build.language.expansion import Unknown

SHELL = ("/bin/sh", "-c")


@dataclass
class State:
    """A variable whose value is the image's own is not in ``env``."""

    root: str
    tip: str | None
    env: dict[str, str | None] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    arguments: dict[str, str | None] = field(default_factory=dict)
    workdir: str | None = None
    made: set[str] = field(default_factory=set)
    shell: tuple[str, ...] = SHELL
    entrypoint: tuple[str, ...] = ()
    entrypoint_is_list: bool = True
    command: tuple[str, ...] = ()
    command_is_own: bool = False  # of this stage, not of the one before
    labels: dict[str, str] = field(default_factory=dict)
    ports: list[str] = field(default_factory=list)

    def lookup(self, name: str) -> str | None:
        """``Unknown`` for what the image may have set."""
        if name in self.unknown:
            raise Unknown
        if name in self.env:
            return self.env[name]
        if name in self.arguments:
            return self.arguments[name]
        if self.root == "scratch":
            return None
        raise Unknown

    def child(self) -> State:
        """As a stage that begins from this one finds it."""
        return replace(
            self,
            env=dict(self.env),
            unknown=set(self.unknown),
            arguments=dict(self.arguments),
            made=set(self.made),
            command_is_own=False,
            labels=dict(self.labels),
            ports=list(self.ports),
        )
