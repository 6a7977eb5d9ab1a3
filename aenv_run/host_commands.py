"""Commands that look at, or work through, all of a machine's home: a server runs them for its clients.

What they need is there and not here (its drivers, its cache, gigabytes of its repository), so what crosses is the
command and its JSON.
"""

from __future__ import annotations

from pydantic import Field

from aenv_run.errors import InvalidInput
from aenv_run.types import Model

#: The command, and the options that it may be given; one that ends with = takes a value.
COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("doctor",): (),
    ("check",): ("--deep", "--repair"),
    ("gc",): (
        *("--dry-run", "--grace=", "--build-cache-older-than=", "--quarantine-older-than="),
        *("--drop-holder=", "--force", "--allow-no-refs"),
    ),
    ("pack",): ("--older-than=", "--dry-run"),
    ("cache", "show"): (),
    ("cache", "prefetch"): (),
    ("cache", "prune"): ("--all",),
    ("du",): (),
}
#: How many arguments they take, at least and at most; the others take none.
ARGUMENTS: dict[tuple[str, ...], tuple[int, int]] = {("cache", "prefetch"): (1, 1), ("du",): (0, 64)}
#: Between two signs of life.
ALIVE_S = 10.0
MAX_OUTPUT_BYTES = 64 << 20
MAX_LINE_BYTES = 64 << 10


class HostRequest(Model):
    """One command, with its options and arguments."""

    command: tuple[str, ...] = Field(min_length=1, max_length=2)
    options: tuple[str, ...] = Field((), max_length=16)
    arguments: tuple[str, ...] = Field((), max_length=64)

    def argv(self) -> list[str]:
        """As the command line takes it; ``InvalidInput`` for what clients may not have run."""
        known = COMMANDS.get(self.command)
        if known is None:
            raise InvalidInput(f"{' '.join(self.command)[:80]!r} is no command that a server runs")
        for option in self.options:
            name, equals, value = option.partition("=")
            if name + equals not in known or len(value) > 256 or not value.isprintable():
                raise InvalidInput(f"{' '.join(self.command)} has no option {name[:40]}")
        least, most = ARGUMENTS.get(self.command, (0, 0))
        if not least <= len(self.arguments) <= most:
            raise InvalidInput(f"{' '.join(self.command)} takes {least} to {most} arguments")
        if not all(len(one) <= 256 and one.isprintable() for one in self.arguments):
            raise InvalidInput(f"an argument of {' '.join(self.command)} is too long or cannot be printed")
        return [*self.command, "--json", *self.options, "--", *self.arguments]


class HostLine(Model):
    """A line of the answer: what the command says meanwhile, a sign of life, or its end with its JSON."""

    says: str | None = None
    exit_code: int | None = None
    output: str = ""
