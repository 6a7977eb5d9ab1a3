"""``aenv-build`` and its subcommands. What is no subcommand's name is the recipe of the first, ``build``."""

from __future__ import annotations

import os
import sys

import click
from click.shell_completion import CompletionItem

from aenv_build.reports.ending import interrupted
from aenv_build.reports.workflow_commands import harmless, on_github
from aenv_run.cli.lazy import LazyGroup, Table
from aenv_run.cli.signals import heeding_signals
from aenv_run.errors import AenvError, Interrupted, InvalidInput, from_os
from aenv_run.printable import printable_lines

PLAIN = "build"
COMMANDS: Table = {
    PLAIN: ("build_command", "build_recipe", "build a recipe; the word may be left out"),
    "lock": ("lock_command", "lock_recipe", "write down what a recipe's moving names mean today"),
    "from-dockerfile": ("dockerfile_command", "from_dockerfile", "translate a Dockerfile into a recipe"),
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
@click.version_option(package_name="aenv", prog_name="aenv-build")
def command() -> None:
    """Build recipes."""


def run() -> int:
    """Run the command; its exit code. Every error of ours is one message, never a traceback."""
    with heeding_signals() as heeding:
        code = _run()
    return heeding.exit_code or code


def _run() -> int:
    try:
        result = command.main(prog_name="aenv-build", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except Interrupted:
        return _fail(interrupted())
    except AenvError as error:
        return _fail(error)
    except (KeyboardInterrupt, click.Abort):
        return _fail(interrupted())
    except click.ClickException as error:
        error.show()
        return InvalidInput.exit_code
    except BrokenPipeError:
        # The reader of our output is gone: nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if os.environ.get("AENV_DEBUG"):
            raise
        return _fail(from_os(error))


def _fail(error: AenvError) -> int:
    shown = harmless if on_github(os.environ) else printable_lines
    click.echo(shown(f"error: {error.message}"), err=True)
    if error.fix:
        click.echo(shown(f"fix: {error.fix}"), err=True)
    return error.exit_code
