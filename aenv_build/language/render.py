"""Jinja2 in a recipe's text: sandboxed, every unknown name an error at the recipe's own line."""

from __future__ import annotations

from collections.abc import Mapping

from aenv_build.language.document import Data, Document, Where, is_text, nearest
from aenv_build.language.matrix import Cell
from aenv_build.language.templates import TemplateError, Templates, Values
from aenv_run.errors import InvalidInput, RecipeError

#: Not rendered: the values templates refer to, and what must be readable without them.
LITERAL_KEYS = frozenset({"vars", "version", "matrix", "include"})


#: Characters that all templates of a recipe, of all its cells, may make together.
MAX_RENDERED = 32 << 20


class Budget:
    """What is left of it. Each text is bounded by itself; a recipe may have many."""

    def __init__(self, characters: int = MAX_RENDERED) -> None:
        self.left = characters

    def take(self, characters: int) -> bool:
        """Whether there was as much."""
        self.left -= characters
        return self.left >= 0


def render(
    document: Document,
    overrides: Mapping[str, str],
    cell: Mapping[str, str] | None = None,
    budget: Budget | None = None,
) -> dict[str, Data]:
    """The document's data with ``{{ vars.x }}`` filled in; ``overrides`` win over the recipe's own vars.

    ``cell`` are the values of ``{{ matrix.x }}``; ``budget`` is shared by the cells of a recipe.
    """
    own = document.data.get("vars") or {}
    if not isinstance(own, dict):
        raise document.error(("vars",), "vars is a mapping of names to text")
    texts: dict[str, str] = {}
    for name, value in own.items():
        if not isinstance(value, str):
            raise document.error(("vars", name), f"the var {name!r} must be text, not a list or a mapping")
        texts[name] = value
    for name in overrides:
        if name not in own:
            raise InvalidInput(
                f"--var {name}: {document.file} has no var of that name ({nearest(name, own)})",
                fix="declare it under 'vars:' with a default",
            )
    values = {**texts, **overrides}
    renderer = _Renderer(document, Values("vars", values), Values("matrix", cell or {}), budget or Budget())
    result: dict[str, Data] = {}
    for key, value in document.data.items():
        result[key] = value if key in LITERAL_KEYS else renderer.value(value, (key,))
    result["vars"] = dict(values)
    return result


class _Renderer:
    def __init__(self, document: Document, variables: Values, cell: Values, budget: Budget) -> None:
        self._document = document
        self._budget = budget
        self._engine = Templates()
        self._values = {"vars": variables, "matrix": cell}

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
            rendered = self._engine.rendered(text, **self._values)
            if not is_text(rendered):
                raise TemplateError("a NUL or half of a surrogate pair is no text", 1)
        except TemplateError as error:
            cell = f" (in the cell {Cell(self._values['matrix'])})" if self._values["matrix"] else ""
            raise self._error(where, f"template: {error.message}{cell}", error.line) from None
        if not self._budget.take(len(rendered)):
            message = f"template: the texts of the recipe are longer than {MAX_RENDERED >> 20} MiB together"
            raise self._error(where, message, 1)
        return rendered

    def _error(self, where: Where, message: str, line: int) -> RecipeError:
        """At the template's own line: a block scalar's text starts on the line below its mark."""
        mark = self._document.mark(where)
        block = where in self._document.blocks
        if not block and line == 1:
            return RecipeError(f"{mark}: {message}")
        return RecipeError(f"{mark.file}:{mark.line + line - (0 if block else 1)}:1: {message}")
