"""The command ``aenv-build``: its way in."""

from __future__ import annotations

from aenv_run.cli import leaving_at_once


def main() -> None:
    """Run the command; every error is one message and its exit code, never a traceback."""
    with leaving_at_once():
        from aenv_build.commands.command import run
        from aenv_run.cli.signals import leave
    leave(run())


if __name__ == "__main__":
    main()
