"""completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(
    epilog="\b\nExamples:\n  aenv completion bash > /etc/bash_completion.d/aenv\n"
    "  aenv completion zsh > ~/.zfunc/_aenv\n  aenv completion fish > ~/.config/fish/completions/aenv.fish"
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL."""
    from aenv_run.cli.command import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "aenv", "_AENV_COMPLETE").source())
