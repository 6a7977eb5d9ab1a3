"""The Jinja2 of recipes: its sandbox, cut down to what cannot make a gigabyte from a word.

Jinja2's own sandbox keeps a template from the host's objects, not from its memory: ``"x"|center(3000000000)`` is
legal there. So the language is a short list: values, conditions, one level of ``for``, and filters and methods
that give back no more than a small multiple of what they get. All of it is checked before anything is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.filters import FILTERS
from jinja2.sandbox import SandboxedEnvironment

from aenv_build.language import template_words as words

MAX_TEXT = 256 * 1024
MAX_RANGE = 1000
#: How many operands ``~`` may have in one template; each is at most a var of the recipe.
MAX_CONCATENATED = 64
MAX_INT = 2**64

CHEAP_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "first", "float", "int", "last", "length", "list", "lower",
    "max", "min", "reverse", "sort", "string", "title", "tojson", "trim", "unique", "upper",
)  # fmt: skip
METHODS = frozenset(
    {
        "capitalize", "count", "endswith", "find", "get", "items", "keys", "lower", "lstrip", "partition",
        "removeprefix", "removesuffix", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
        "strip", "title", "upper", "values",
    }
)  # fmt: skip
_LANGUAGE = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.CondExpr, nodes.Name, nodes.Const,
    nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.Slice, nodes.Getattr, nodes.Getitem,
    nodes.Filter, nodes.Test, nodes.Call, nodes.Concat, nodes.Compare, nodes.Operand, nodes.Not, nodes.And,
    nodes.Or, nodes.Neg, nodes.Pos, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod,
    nodes.Pow,
)  # fmt: skip


class TemplateError(Exception):
    """What is wrong, in words of the recipe, and in which line of the template, counted from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


class Refused(Exception):
    """An operation that recipes do not have; its text says which."""


class Values(dict[str, str]):
    """What ``{{ vars.x }}`` or ``{{ matrix.x }}`` refers to; ``kind`` is its first word."""

    def __init__(self, kind: str, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.kind = kind


class _Unknown(jinja2.StrictUndefined):
    """What does not exist, told in words of the recipe."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        name, of = self._undefined_name, self._undefined_obj
        if isinstance(of, Values):
            return words.no_value(of.kind, str(name), of)
        if of is jinja2.utils.missing:
            return words.no_name(str(name))
        return words.no_part(of, name)


class Templates(SandboxedEnvironment):
    """Renders one text at a time; raises ``TemplateError`` and nothing else."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(undefined=_Unknown, keep_trailing_newline=True, autoescape=False, finalize=_plain)
        self.filters = {name: FILTERS[name] for name in CHEAP_FILTERS}
        self.filters |= {"replace": _replace, "join": _join}
        self.globals = {"range": _range}

    def getattr(self, obj: object, attribute: str) -> object:
        """A var or matrix value of any name; ``items`` of other mappings is their method."""
        return obj[attribute] if isinstance(obj, Values) and attribute in obj else super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        """What the sandbox keeps back does not exist in recipes."""
        return self.undefined(obj=obj, name=attribute)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic of small numbers; of text only ``+``, within the limit."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _bound(len(left) + len(right))
        elif operator == "**" or not all(isinstance(x, int | float) and abs(x) < MAX_INT for x in (left, right)):
            raise Refused(f"the operator {operator} takes small numbers only")
        return super().call_binop(context, operator, left, right)

    def rendered(self, text: str, **values: object) -> str:
        """The text with the values filled in, at most ``MAX_TEXT`` long."""
        try:
            tree = self.parse(text)
            self._check(tree)
            parts: list[str] = []
            length = 0
            for part in self.from_string(tree).generate(**values):
                length += len(part)
                _bound(length)
                parts.append(part)
        except TemplateError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(words.of_syntax(error.message or ""), error.lineno) from None
        except (jinja2.UndefinedError, Refused) as error:
            raise TemplateError(str(error), _line_of(error)) from None
        except Exception as error:  # noqa: BLE001 - whatever an operation raises, the author needs the recipe's line
            raise TemplateError(words.of_error(error), _line_of(error)) from None
        return "".join(parts)

    def _check(self, tree: nodes.Template) -> None:
        """Nothing but the language; errors at the line of the template."""
        concatenated = 0
        pending: list[tuple[nodes.Node, bool]] = [(tree, False)]
        while pending:
            node, in_loop = pending.pop()
            if isinstance(node, nodes.For):
                if in_loop:
                    raise _not_here(node, "a 'for' within a 'for'")
                if node.recursive:
                    raise _not_here(node, "'recursive'")
                in_loop = True
            elif isinstance(node, nodes.Concat):
                concatenated += len(node.nodes)
                if concatenated > MAX_CONCATENATED:
                    raise _not_here(node, f"'~' with more than {MAX_CONCATENATED} operands")
            elif isinstance(node, nodes.Call) and not _may_be_called(node.node):
                raise _not_here(
                    node, f"this call: there are range() and the methods {', '.join(sorted(METHODS))};"
                )
            elif isinstance(node, nodes.Filter) and node.name not in self.filters:
                raise TemplateError(words.no_such("filter", node.name, self.filters), node.lineno)
            elif isinstance(node, nodes.Test) and node.name not in self.tests:
                raise TemplateError(words.no_such("test", node.name, self.tests), node.lineno)
            elif not isinstance(node, _LANGUAGE):
                raise _not_here(node, f"'{words.of_node(type(node).__name__)}'")
            pending += [(child, in_loop) for child in node.iter_child_nodes()]


def _line_of(error: BaseException) -> int:
    """The template line of a run-time error: the last traceback frame that jinja2 rewrote."""
    line = 1
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _plain(value: object) -> object:
    """A value that has one form as text; what has none (a method, an unread sequence) would differ each time."""
    if isinstance(value, jinja2.Undefined | str | int | float) or value is None:
        return value
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    raise Refused(words.not_text(value))


def _may_be_called(what: nodes.Expr) -> bool:
    if isinstance(what, nodes.Getattr):
        return what.attr in METHODS
    return isinstance(what, nodes.Name) and what.name == "range"


def _not_here(node: nodes.Node, what: str) -> TemplateError:
    return TemplateError(f"{what} is not for recipes", node.lineno)


def _bound(length: int) -> None:
    if length > MAX_TEXT:
        raise Refused(f"the rendered text is longer than {MAX_TEXT // 1024} KiB")


def _range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > MAX_RANGE:
        raise Refused(f"a range has at most {MAX_RANGE} numbers")
    return found


def _replace(value: object, old: str, new: str) -> str:
    text = str(value)
    _bound(len(text) + text.count(old) * len(new))
    return text.replace(old, new)


def _join(values: Iterable[object], separator: str = "") -> str:
    words: list[str] = []
    length = 0
    for value in values:
        words.append(str(value))
        length += len(words[-1]) + len(separator)
        _bound(length)
    return separator.join(words)
