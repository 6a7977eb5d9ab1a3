"""``aenv`` and its subcommands. They are imported when they are used, so that ``aenv --help`` is instant."""

from __future__ import annotations

import os
import sys

import click

from aenv_run.cli.lazy import LazyGroup, Table
from aenv_run.cli.signals import heeding_signals, telling_of_waits
from aenv_run.errors import AenvError, Interrupted, InvalidInput, from_os
from aenv_run.printable import printable_lines

COMMANDS: Table = {
    "start": ("sandboxes", "start", "launch a sandbox from a snapshot"),
    "exec": ("execute", "execute", "run a command in a sandbox and exit with its code"),
    "connect": ("execute", "connect", "open a shell in a sandbox"),
    "ls": ("sandboxes", "list_sandboxes", "list sandboxes"),
    "pause": ("sandboxes", "pause", "keep a sandbox's memory and disk in files and end its machine"),
    "resume": ("sandboxes", "resume", "go on with a paused sandbox"),
    "fork": ("sandboxes", "fork", "make copies of a running sandbox"),
    "timeout": ("sandboxes", "timeout", "give a sandbox another time to live"),
    "network": ("network", "network", "show or change what a sandbox may reach"),
    "port-forward": ("network", "port_forward", "bring a port of a sandbox to this machine"),
    "reset": ("sandboxes", "reset", "begin again from the snapshot: the next episode"),
    "pool": ("pool", "pool", "machines that stand ready of a snapshot"),
    "rm": ("sandboxes", "remove", "kill and remove sandboxes"),
    "cp": ("copy", "copy", "copy files and directories into or out of a sandbox"),
    "upload": ("transfer", "upload", "copy a file or directory into a sandbox, content alone"),
    "download": ("transfer", "download", "copy a file or directory out of a sandbox, content alone"),
    "snapshot": ("snapshots", "snapshot", "commit a sandbox's state as a snapshot"),
    "pull": ("templates", "pull", "make a template of a container image"),
    "build": ("build", "build", "make a template of a Dockerfile"),
    "template": ("templates", "template", "templates: list, watch, tag, delete"),
    "catalog": ("catalog", "catalog", "named snapshots: list, show, tag, promote, roll back, remove"),
    "check": ("check", "check", "is the repository whole"),
    "gc": ("gc", "gc", "delete snapshots and blobs that nothing needs"),
    "du": ("du", "du", "what names and versions take in the repository"),
    "pack": ("pack", "pack", "compress what has not been used for a while"),
    "cache": ("cache", "cache", "blobs that are local to this machine: show, prune"),
    "doctor": ("doctor", "doctor", "what works on this machine, what is missing and how to get it"),
    "serve": ("serve", "serve", "serve the HTTP API that E2B's SDKs speak"),
    "node": ("node", "node", "the node process that keeps the sandboxes"),
    "auth": ("auth", "auth", "say which server the other commands speak to"),
    "completion": ("completion", "completion", "print the completion script of a shell"),
}


class AenvGroup(LazyGroup):
    """The commands of ``COMMANDS``."""

    table, package = COMMANDS, "aenv_run.cli"

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, and an unknown command is answered with the nearest one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else " `aenv --help` lists the commands."
            context.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


EPILOG = """\b
Examples:
  aenv catalog ls
  aenv start swe-task:1
  aenv exec s4f -- python3 -m pytest -q
  aenv fork s4f -n 4
  aenv rm --all

An id may be shortened as long as it is unique. AENV_HOME says where everything is kept."""


@click.group(
    cls=AenvGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="aenv", prog_name="aenv")
@click.option("--local", is_flag=True, help="This machine, whatever `aenv auth` or AENV_API_URL say.")
def cli(local: bool) -> None:
    """Launch, pause, fork and snapshot sandboxes."""


def run(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code. Of one that a signal stopped it is that of the signal."""
    with heeding_signals() as heeding, telling_of_waits():
        code = _run(argv)
    return heeding.exit_code or code


def _run(argv: list[str] | None) -> int:
    try:
        result = cli.main(args=argv, prog_name="aenv", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return InvalidInput.exit_code
    except AenvError as error:
        if os.environ.get("AENV_DEBUG"):
            raise
        return report(error)
    except ValueError as error:
        from pydantic import ValidationError

        if not isinstance(error, ValidationError):
            raise
        first = error.errors()[0]  # of a request that was made of the options
        where = ".".join(str(part) for part in first["loc"])
        return report(InvalidInput(f"{where}: {first['msg']}" if where else first["msg"]))
    except (click.Abort, KeyboardInterrupt):
        return report(Interrupted("interrupted"))
    except BrokenPipeError:
        # The reader of our output is gone (`aenv ls | head`): nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if os.environ.get("AENV_DEBUG"):
            raise
        return report(from_os(error))


def report(error: AenvError) -> int:
    """Print an error for people; its exit code."""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {printable_lines(error.message)}", err=True)
    if error.fix:
        click.echo(f"  {click.style('fix:', fg='green', bold=True)} {printable_lines(error.fix)}", err=True)
    return error.exit_code
