"""``aenv-build`` and its subcommands. What is no subcommand's name is the recipe of the first, ``build``."""

from __future__ import annotations

import asyncio
import os
import sys

import click
from click.shell_completion import CompletionItem

from aenv_build.reports.ending import interrupted
from aenv_build.reports.workflow_commands import harmless, on_github
from aenv_run.cli.lazy import LazyGroup, Table
from aenv_run.errors import AenvError, InvalidInput, from_os
from aenv_run.printable import printable_lines

PLAIN = "build"
COMMANDS: Table = {
    PLAIN: ("build_command", "build_recipe", "build a recipe; the word may be left out"),
    "lock": ("lock_command", "lock_recipe", "write down what a recipe's moving names mean today"),
    "graph": ("graph_command", "draw", "draw a recipe's steps: Mermaid, DOT or SVG"),
    "cache": ("cache_command", "cache", "show or empty what steps keep between builds"),
}
_OWN_OPTIONS = ("--version",)


class BuildGroup(LazyGroup):
    """Its commands are imported when they are used; without the name of one, the arguments are build's."""

    table, package = COMMANDS, "aenv_build.commands"

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """``RECIPE …`` is ``build RECIPE …``; so is its help, which then lists the other commands."""
        if not args and not context.resilient_parsing:
            args = ["--help"]
        if args and args[0] not in (*COMMANDS, *_OWN_OPTIONS):
            args = [PLAIN, *args]
        return super().parse_args(context, args)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """The first word: a command, a recipe's path, or an option of the plain form."""
        build = self.get_command(context, PLAIN)
        assert build is not None
        if incomplete.startswith("-"):
            return build.shell_complete(context, incomplete)
        return [*super().shell_complete(context, incomplete), CompletionItem(incomplete, type="file")]


def other_commands(formatter: click.HelpFormatter) -> None:
    """The section of the plain form's help that lists the rest."""
    rest = [(name, text) for name, (_, _, text) in COMMANDS.items() if name != PLAIN]
    if rest:
        with formatter.section("Other commands"):
            formatter.write_dl(rest)


@click.group(cls=BuildGroup)
@click.version_option(package_name="aenv")
def command() -> None:
    """Build recipes."""


def main() -> None:
    """Run the command; every error of ours is one message and its exit code, never a traceback."""
    try:
        command(standalone_mode=False)
    except AenvError as error:
        _fail(error)
    except (KeyboardInterrupt, asyncio.CancelledError, click.Abort):
        _fail(interrupted())
    except click.ClickException as error:
        error.show()
        sys.exit(InvalidInput.exit_code)
    except BrokenPipeError:
        # The reader of our output is gone: nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if os.environ.get("AENV_DEBUG"):
            raise
        _fail(from_os(error))


def _fail(error: AenvError) -> None:
    shown = harmless if on_github(os.environ) else printable_lines
    click.echo(shown(f"error: {error.message}"), err=True)
    if error.fix:
        click.echo(shown(f"fix: {error.fix}"), err=True)
    sys.exit(error.exit_code)
