"""docs/remote.md says of every command what it does for a server, and which test shows it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click
import pytest

from aenv_run.cli.command import cli
from aenv_run.errors import InvalidInput
from aenv_run.host_commands import COMMANDS, HostRequest
from tests.unit.test_cli_shape import commands

ROOT = Path(__file__).parents[2]
FILES = ("tests/unit/test_remote_commands.py", "tests/contracts/test_remote_guest.py")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "remote.md").read_text().splitlines()
    if line.startswith("| `aenv ")
]


def leaves() -> dict[str, click.Command]:
    return {" ".join(path): found for path, found in commands(cli) if not isinstance(found, click.Group)}


def test_every_command_is_in_the_table() -> None:
    assert sorted(row[0].strip("`").removeprefix("aenv ") for row in ROWS) == sorted(leaves())


def sources() -> dict[str, str]:
    found: dict[str, str] = {}
    for file in FILES:
        text = (ROOT / file).read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_the_table_says_is_shown_by_a_test(row: list[str]) -> None:
    command, how, why, test = row[0].strip("`").removeprefix("aenv "), row[1], row[2], row[3].strip("`")
    assert why and how in ("yes", "there", "here", "no")
    assert (how == "there") is (tuple(command.split()) in COMMANDS)
    if how == "here":
        return
    words = r"[\s\",']+".join(command.split())
    assert re.search(rf"\b{words}\b", sources()[test]), f"{test} does not run {command}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_takes_every_option_of_what_it_runs(command: tuple[str, ...]) -> None:
    params = leaves()[" ".join(command)].params
    options = {
        max(one.opts, key=len) + ("" if one.is_flag else "=") for one in params if isinstance(one, click.Option)
    }
    assert set(COMMANDS[command]) == options - {"--json"}


WRONG: list[dict[str, object]] = [
    {"command": ("rm",)},
    {"command": ("serve",)},
    {"command": ("cache", "nonsense")},
    {"command": ("gc",), "options": ("--nonsense",)},
    {"command": ("gc",), "options": ("--dry-run=1",)},
    {"command": ("gc",), "options": ("--grace",)},
    {"command": ("gc",), "options": ("--grace=1\n",)},
    {"command": ("gc",), "arguments": ("x",)},
    {"command": ("cache", "prefetch")},
    {"command": ("cache", "prefetch"), "arguments": ("a", "b")},
    {"command": ("cache", "prefetch"), "arguments": ("a\0b",)},
    {"command": ("doctor",), "options": ("--help",)},
]


@pytest.mark.parametrize("request_", WRONG, ids=str)
def test_a_server_runs_nothing_else(request_: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        HostRequest.model_validate(request_).argv()


def test_an_argument_is_never_an_option() -> None:
    asked = HostRequest(command=("du",), arguments=("--help", "tiny:1"))
    assert asked.argv() == ["du", "--json", "--", "--help", "tiny:1"]
