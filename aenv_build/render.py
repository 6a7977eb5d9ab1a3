"""Jinja2 in a recipe's text: sandboxed, every unknown name an error at the recipe's own line."""

from __future__ import annotations

from collections.abc import Mapping

import jinja2

from aenv_build.document import Data, Document, Where, nearest
from aenv_build.templates import Templates
from aenv_run.errors import InvalidInput, RecipeError

#: Not rendered: the values templates refer to, and what must be readable without them.
LITERAL_KEYS = frozenset({"vars", "version"})


def render(document: Document, overrides: Mapping[str, str]) -> dict[str, Data]:
    """The document's data with ``{{ vars.x }}`` filled in; ``overrides`` win over the recipe's own vars."""
    own = document.data.get("vars") or {}
    if not isinstance(own, dict):
        raise document.error(("vars",), "vars is a mapping of names to text")
    for name, value in own.items():
        if not isinstance(value, str):
            raise document.error(("vars", name), f"the var {name!r} must be text, not a list or a mapping")
    for name in overrides:
        if name not in own:
            raise InvalidInput(
                f"--var {name}: {document.file} has no var of that name ({nearest(name, own)})",
                fix="declare it under 'vars:' with a default",
            )
    values = {**own, **overrides}
    renderer = _Renderer(document, Templates(), values)
    result: dict[str, Data] = {}
    for key, value in document.data.items():
        result[key] = value if key in LITERAL_KEYS else renderer.value(value, (key,))
    result["vars"] = dict(values)
    return result


class _Renderer:
    def __init__(self, document: Document, engine: Templates, values: Mapping[str, Data]) -> None:
        self._document = document
        self._engine = engine
        self._values = values

    def value(self, value: Data, where: Where) -> Data:
        """The value with all text in it rendered; keys are never templates."""
        if isinstance(value, str):
            return self._text(value, where)
        if isinstance(value, list):
            return [self.value(item, (*where, index)) for index, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: self.value(item, (*where, key)) for key, item in value.items()}
        return value

    def _text(self, text: str, where: Where) -> str:
        if "{{" not in text and "{%" not in text and "{#" not in text:
            return text
        try:
            return self._engine.rendered(text, vars=self._values)
        except jinja2.TemplateSyntaxError as error:
            raise self._error(where, f"template: {error.message}", error.lineno) from None
        except jinja2.UndefinedError as error:
            name = _missing_name(str(error))
            raise self._error(where, f"no var is called {name!r}; {self._hint(name)}", _line_of(error)) from None
        except Exception as error:  # noqa: BLE001 - a template may raise anything; the author needs the recipe's line
            raise self._error(where, f"template: {error}", _line_of(error)) from None

    def _hint(self, name: str) -> str:
        return nearest(name, self._values) if self._values else "declare it under 'vars:'"

    def _error(self, where: Where, message: str, line: int) -> RecipeError:
        """At the template's own line: a block scalar's text starts on the line below its mark."""
        mark = self._document.mark(where)
        block = where in self._document.blocks
        if not block and line == 1:
            return RecipeError(f"{mark}: {message}")
        return RecipeError(f"{mark.file}:{mark.line + line - (0 if block else 1)}:1: {message}")


def _line_of(error: BaseException) -> int:
    """The template line of a run-time error: the last traceback frame that jinja2 rewrote."""
    line = 1
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _missing_name(message: str) -> str:
    """The name in jinja2's "'dict object' has no attribute 'x'" or "'x' is undefined"."""
    parts = message.split("'")
    return parts[-2] if len(parts) >= 3 else ""
