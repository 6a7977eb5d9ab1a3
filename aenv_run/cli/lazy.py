"""Commands that are imported when they are used, so that ``--help`` is instant."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

import click

from aenv_run.cli import leaving_at_once

#: Name -> (module, attribute, line of help), in the order that help shows them.
Table = Mapping[str, tuple[str, str, str]]


class LazyGroup(click.Group):
    """Lists commands from ``table``, whose modules are in ``package``, and imports one when it is asked for."""

    table: ClassVar[Table]
    package: ClassVar[str]

    def list_commands(self, context: click.Context) -> list[str]:
        """In the order of the table."""
        return list(self.table)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import it."""
        if name not in self.table:
            return None
        module, attribute, _ = self.table[name]
        with leaving_at_once():
            command = getattr(importlib.import_module(f"{self.package}.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command
