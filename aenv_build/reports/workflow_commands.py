"""Lines that the runner of GitHub Actions obeys, and how text of others is kept from being one.

It obeys ``::name key=value::data`` at the start of a line and ``##[name key=value]data`` anywhere in one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from aenv_run.printable import printable_lines

#: `##[`, with nothing or with what is not ASCII between: the runner compares as people read.
_OLD_COMMAND = re.compile(r"#(?=[^\x20-\x7e]*#[^\x20-\x7e]*\[)")
_COMMAND = re.compile(r"[^\x21-\x7e]*:[^\x20-\x7e]*:")


def on_github(environment: Mapping[str, str]) -> bool:
    """Whether this is a job of GitHub Actions."""
    return environment.get("GITHUB_ACTIONS") == "true"


def harmless(text: str) -> str:
    """One or more lines of which the runner takes none for a command."""
    lines = _OLD_COMMAND.sub("# ", printable_lines(text)).split("\n")
    return "\n".join(f"· {line}" if _COMMAND.match(line) else line for line in lines)


def harmless_json(text: str) -> str:
    """The same JSON, in which no line has ``##[``."""
    return _OLD_COMMAND.sub(r"\\u0023", text)


def command(name: str, message: str, **properties: str) -> str:
    """A line that the runner obeys."""
    pairs = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name}{' ' if pairs else ''}{pairs}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
