"""How the commands speak: tables or JSON on stdout, progress on a terminal's stderr only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import click
from pydantic import BaseModel

from aenv_run.amounts import size
from aenv_run.errors import InvalidInput
from aenv_run.printable import printable, printable_lines

picture_option = click.option(
    "--output", type=click.Path(path_type=Path), help="Write it to this new file instead of printing it."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def put_picture(drawn: bytes, output: Path | None) -> None:
    """Print it, or write it to a file that must not be there yet."""
    if output is None:
        sys.stdout.buffer.write(drawn)
        sys.stdout.buffer.flush()
        return
    try:
        with output.open("xb") as file:
            file.write(drawn)
    except FileExistsError:
        raise InvalidInput(f"{output} exists already", fix="give the name of a new file, or remove it") from None


def print_json(value: BaseModel | Sequence[BaseModel] | dict[str, object] | list[object]) -> None:
    """One JSON document."""
    plain = _plain(value)
    text = json.dumps(plain, indent=2, ensure_ascii=False)
    if text != printable_lines(text):  # JSON leaves some control characters as they are, such as 0x9b
        text = json.dumps(plain, indent=2)
    click.echo(text)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str = "") -> None:
    """A table without lines, cut to nothing: it can be piped. ``empty`` goes to stderr when there are no rows."""
    if not rows:
        if empty:
            click.echo(empty, err=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(" ".join(cell.splitlines()))) for cell in row))
    console = Console(highlight=False)
    width = Console(width=10_000).measure(table).maximum
    if not console.is_terminal:
        console = Console(highlight=False, width=max(width, 1))
    elif width > console.width:
        console = Console(highlight=False, width=width, soft_wrap=True)
    console.print(table)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """While something takes more than a moment; silent when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


class ProgressLine:
    """One line on a terminal's stderr for what takes more than a second, gone at the end."""

    def __init__(self, what: str) -> None:
        self._what = printable(what)
        self._shown = False
        self._next_s = time.monotonic() + 1

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Say how far it is; often enough is often."""
        if time.monotonic() < self._next_s or not sys.stderr.isatty():
            return
        self._next_s, self._shown = time.monotonic() + 0.2, True
        click.echo(f"\r\x1b[2K{self._what} {size(done_bytes)} of {size(total_bytes)}", err=True, nl=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            click.echo("\r\x1b[2K", err=True, nl=False)
