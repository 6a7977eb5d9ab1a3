"""What is wrong with a template, in words of the recipe: its author knows neither Jinja2 nor Python."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from aenv_build.language.document import nearest

_TOKENS = {
    "end of print statement": "'}}'",
    "end of statement block": "'%}'",
    "end of template": "the end of the text",
    "name": "a name",
    "string": "a text in quotes",
    "integer": "a number",
}
#: (what the parser says, what we say with its groups); the first that fits.
_SYNTAX: tuple[tuple[str, str], ...] = (
    (r"Expected an expression, got '(.*)'", "a value is missing before {0}"),
    (r"Encountered unknown tag '(.*?)'.*", "'{{% {0} %}}' is not for recipes; there are if, elif, else and for"),
    (r"expected token '(.*)', got '(.*)'", "{1} stands where {0} should"),
    (r"unexpected char (.+) at [0-9]+", "{0} has no meaning here"),
    (r"[Uu]nexpected '(.*)', expected '(.*)'", "{0} stands where {1} should"),
    (
        r"[Uu]nexpected end of template.*",
        "it ends too early: a '{{{{', '{{% if %}}' or '{{% for %}}' is not closed",
    ),
    (r"unexpected '(.*)'", "{0} is not expected here"),
    (r"Missing end of comment tag", "'{{#' is not closed by '#}}'"),
    (r"Missing end of raw directive", "'{{% raw %}}' is not for recipes"),
    (r"tag name expected", "a word such as if or for is missing after '{{%'"),
    (r"can't assign to .*", "a loop needs a name of its own: for NAME in …"),
    (r"(invalid syntax|expected name or number)", "a name is missing after '.'"),
)
_NODES = {"assign": "set", "assignblock": "set", "filterblock": "filter", "callblock": "call"}


def of_syntax(message: str) -> str:
    """For what does not parse."""
    for pattern, ours in _SYNTAX:
        if found := re.fullmatch(pattern, message, re.DOTALL):
            shown = [_TOKENS.get(group, group if group[:1] in "'\"" else f"'{group}'") for group in found.groups()]
            return ours.format(*(found.groups() if "{{% {0}" in ours else shown))
    return "it cannot be read: a template is {{ a value }} or {% if … %} … {% endif %}"


def of_error(error: Exception) -> str:
    """For an operation that fails while the text is made."""
    if isinstance(error, ZeroDivisionError):
        return "a division by zero"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OverflowError | MemoryError):
        return "a number or text is too large"
    return "these values do not go together; vars and matrix values are text, '|int' makes a number of one"


def of_node(name: str) -> str:
    """What of the language the recipe used, as it is written."""
    return _NODES.get(name.lower(), name.lower())


def no_such(what: str, name: str, known: Iterable[str]) -> str:
    """A filter or test that recipes do not have."""
    return f"there is no {what} {name!r} in recipes; {nearest(name, known)}"


def no_value(kind: str, name: str, values: Mapping[str, str]) -> str:
    """``{{ vars.x }}`` without that var."""
    what = "var" if kind == "vars" else "matrix value"
    hint = nearest(name, values) if values else f"declare it under '{kind}:'"
    return f"no {what} is called {name!r}; {hint}"


def no_name(name: str) -> str:
    """A bare word that means nothing."""
    return f"{name!r} is nothing here; write vars.{name} or matrix.{name}, or quotes around a text"


def no_part(of: object, name: object) -> str:
    """Something of a value that it does not have."""
    kind = _kind(of)
    return f"{kind} has no item {name}" if isinstance(name, int) else f"{kind} has no {str(name)!r}"


def not_text(value: object) -> str:
    """A value that cannot stand in a text."""
    if callable(value):
        return "a method needs its brackets: upper()"
    return "this is no text; '|list' or '|join(\", \")' makes one of a sequence"


def _kind(value: object) -> str:
    kinds = ((bool, "a truth value"), (str, "a text"), (int | float, "a number"), (list | tuple, "a list"))
    return next((words for kind, words in kinds if isinstance(value, kind)), "this value")
