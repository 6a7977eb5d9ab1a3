"""A recipe file becomes a ``Recipe``, or an error that starts with file:line:column."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pydantic
from pydantic_core import ErrorDetails

from aenv_build.language.document import Data, Document, Where, nearest
from aenv_build.language.expansion import parse
from aenv_build.language.fragments import read_recipe
from aenv_build.language.matrix import Cell, cells_of, chosen
from aenv_build.language.recipe import Base, Recipe, Step
from aenv_build.language.render import Budget, render
from aenv_build.language.verbs import Write, places_overlap
from aenv_run.catalog import require_publishable
from aenv_run.errors import AenvError, InvalidInput, RecipeError
from aenv_run.types import Digest

MAX_SHOWN = 10


@dataclass(frozen=True)
class Source:
    """A loaded recipe (of a matrix, one cell) with where it came from."""

    recipe: Recipe
    document: Document
    cell: Cell = field(default_factory=Cell)

    @property
    def digest(self) -> Digest:
        """Of the recipe's file, and of its fragments if it has some."""
        return self.document.digest

    @property
    def folder(self) -> Path:
        """What relative paths of the recipe are relative to."""
        return self.document.folder(())

    def folder_at(self, where: Where) -> Path:
        """What a relative path that stands there is relative to: the recipe's folder, or a fragment's own."""
        return self.document.folder(where)

    def error(self, where: Where, message: str, *, fix: str = "") -> RecipeError:
        """An error at a place of the recipe."""
        return self.document.error(where, message, fix=fix)


def load(path: Path, variables: Mapping[str, str] | None = None) -> Source:
    """Read, render and validate a recipe of one cell."""
    sources = load_cells(path, variables)
    if len(sources) > 1:
        raise sources[0].error(
            ("matrix",), "a recipe without a matrix is needed here", fix="name one cell: --cell"
        )
    return sources[0]


def load_cells(
    path: Path,
    variables: Mapping[str, str] | None = None,
    *,
    wanted: Sequence[str] = (),
    roots: Sequence[Path] = (),
) -> tuple[Source, ...]:
    """Read, render and validate each cell of the recipe; give those that ``wanted`` names, or all.

    ``roots``: folders beside the recipe's that fragments may lie in.
    """
    document = read_recipe(path, roots)
    _check_top(document)
    cells = cells_of(document)
    budget = Budget()
    sources = {str(cell): _source(document, variables or {}, cell, budget) for cell in cells}
    if len(cells) > 1:
        _check_names(document, tuple(sources.values()))
    return tuple(sources[str(cell)] for cell in chosen(cells, wanted, document.file))


def _source(document: Document, variables: Mapping[str, str], cell: Cell, budget: Budget) -> Source:
    data = render(document, variables, cell.values, budget)
    _check_steps(document, data)
    try:
        recipe = Recipe.model_validate(data)
    except pydantic.ValidationError as error:
        raise _translate(document, data, error) from None
    _check_choices(document, recipe)
    return Source(recipe, document, cell)


def _check_names(document: Document, sources: Sequence[Source]) -> None:
    """What two cells make must differ in its name, or at least in its tags."""
    taken: dict[tuple[str, str], Cell] = {}
    for source in sources:
        mine: set[tuple[str, str]] = set()
        for position, output in enumerate(source.recipe.outputs):
            name = str(output.name or source.recipe.name)
            mine |= {(name, tag) for tag in output.tags or ("",)}
            for pair in sorted(mine & taken.keys()):
                where: Where = ("outputs", position, "name") if output.name else ("name",)
                other, made = taken[pair], ":".join(filter(None, pair))
                raise document.error(
                    where,
                    f"the cells {other} and {source.cell} both make {made}",
                    fix=f"name what differs, or tag it: {{{{ matrix.{_differing(other, source.cell)} }}}}",
                )
        taken |= dict.fromkeys(mine, source.cell)


def _differing(one: Cell, other: Cell) -> str:
    names = [name for name in other.values if one.values.get(name) != other.values[name]]
    return (names or list(other.values))[0]


def _check_top(document: Document) -> None:
    if "version" not in document.data:
        raise document.error((), "the key 'version' is missing", fix="start the recipe with 'version: 1'")
    if document.data["version"] != 1:
        raise document.error(("version",), "only version 1 of the recipe language exists", fix="write version: 1")


def _check_steps(document: Document, data: dict[str, Data]) -> None:
    """One verb a step, checked before the models so that a typo of the verb is named as one; ids filled in."""
    steps = data.get("steps")
    if not isinstance(steps, list):
        return
    for index, step in enumerate(steps):
        where: Where = ("steps", index)
        if not isinstance(step, dict):
            raise document.error(where, f"a step is a mapping with one of {', '.join(Step.VERBS)}")
        known = {field.alias or name for name, field in Step.model_fields.items()}
        for key in step:
            if key not in known:
                raise document.error((*where, key), f"unknown key {key!r}; {nearest(key, known)}", key=True)
        verbs = [verb for verb in Step.VERBS if step.get(verb) is not None]
        if not verbs:
            raise document.error(where, f"this step does nothing; give it one of {', '.join(Step.VERBS)}")
        if len(verbs) > 1:
            hint = "put user, workdir and env of one command inside it: run: {command: …, env: …}"
            raise document.error(
                (*where, verbs[1]), f"two verbs in one step: {verbs[0]}, {verbs[1]}", fix=hint, key=True
            )
        step.setdefault("id", f"{verbs[0]}-{index + 1}")


def _check_choices(document: Document, recipe: Recipe) -> None:
    """What a single field cannot say."""
    _check_base(document, recipe.base, ("base",))
    for position, output in enumerate(recipe.outputs):
        try:
            require_publishable(output.name or recipe.name)
        except InvalidInput as error:
            at: Where = ("outputs", position, "name") if output.name else ("name",)
            raise document.error(at, error.message, fix=error.fix) from None
    for index, step in enumerate(recipe.steps):
        where: Where = ("steps", index)
        if step.base is not None:
            _check_base(document, step.base, (*where, "base"))
            if step.needs:
                raise document.error((*where, "needs"), "a base stands on no step", key=True)
        if step.ready and not step.start:
            raise document.error((*where, "ready"), "'ready' belongs to a step with 'start'", key=True)
        if step.ready and (step.ready.command, step.ready.port, step.ready.url).count(None) != 2:
            raise document.error((*where, "ready"), "ready takes exactly one of command, port, url")
        for key in ("timeout", "retry", "ttl", "salt"):
            if getattr(step, key) is not None and step.verb not in Step.TIMED:
                raise document.error((*where, key), f"a step with '{step.verb}' takes no {key}", key=True)
        if step.expand and step.env is None:
            raise document.error((*where, "expand"), "'expand' belongs to a step with 'env'", key=True)
        if step.copy_ and step.copy_.unpack and not isinstance(step.copy_.from_, str):
            raise document.error((*where, "copy", "unpack"), "'unpack' takes one archive of the host", key=True)
        for name, value in (step.env or {}).items() if step.expand else ():
            try:
                parse(value)
            except ValueError as error:
                raise document.error((*where, "env", name), str(error)) from None
        _check_secrets(document, recipe, index, step)
        _check_cache(document, index, step)
        if step.git is not None:
            _check_pinned(document, index, step)
        if step.pip and not step.pip.packages and step.pip.requirements is None:
            raise document.error((*where, "pip"), "pip takes packages, requirements, or both")
        if step.write and isinstance(step.write, Write) and step.write.mode and step.write.executable:
            raise document.error((*where, "write", "mode"), "write takes one of executable, mode", key=True)
        if step.verify and step.verify.failed is not None and step.verify.junit is None:
            raise document.error(
                (*where, "verify", "failed"), "'failed' needs 'junit', the report to read", key=True
            )


def _check_base(document: Document, base: Base, where: Where) -> None:
    if [getattr(base, name) is not None for name in Base.model_fields].count(True) != 1:
        raise document.error(where, f"base takes exactly one of {', '.join(Base.model_fields)}")


def _check_pinned(document: Document, index: int, step: Step) -> None:
    git, where = step.git, ("steps", index, "git")
    assert git is not None
    if (git.commit is None) == (git.ref is None):
        raise document.error(where, "git takes exactly one of commit, ref")
    if git.ref is not None and step.ttl is None and step.salt is None:
        raise document.error(
            (*where, "ref"),
            f"{git.ref!r} moves, and the cache would not see it: pin a commit, or say how long it holds",
            fix=f"write commit: and the 40 digits of 'git ls-remote {git.url} {git.ref}', or ttl or salt",
            key=True,
        )


def _check_cache(document: Document, index: int, step: Step) -> None:
    where: Where = ("steps", index, "cache")
    if step.cache and step.verb not in Step.CACHED:
        raise document.error(where, f"a step with '{step.verb}' takes no cache", key=True)
    if (both := places_overlap([mount.path for mount in step.cache])) is not None:
        raise document.error(where, f"one cache lies in the other: {both[0]}, {both[1]}")


def _check_secrets(document: Document, recipe: Recipe, index: int, step: Step) -> None:
    where: Where = ("steps", index, "secrets")
    if step.secrets and step.verb not in Step.GIVEN:
        why = "what it starts would keep them" if step.verb == "start" else "it runs no command"
        raise document.error(where, f"a step with '{step.verb}' takes no secrets: {why}", key=True)
    for position, name in enumerate(step.secrets):
        if name not in recipe.secrets:
            raise document.error(
                (*where, position),
                f"the recipe has no secret {name!r}; {nearest(name, recipe.secrets)}",
                fix=f"declare it at the top: 'secrets: [{name}]'",
            )


def _translate(document: Document, data: Data, error: pydantic.ValidationError) -> AenvError:
    """All problems, in the order of the file."""
    found: dict[tuple[int, int, str], str] = {}
    for detail in error.errors(include_url=False):
        where, extra = _place(data, detail)
        mark = document.key_mark(where) if extra else document.mark(where)
        message = _message(where, detail)
        if message:
            found.setdefault((mark.line, mark.column, message), f"{mark}: {message}")
    lines = [found[key] for key in sorted(found)]
    if len(lines) > MAX_SHOWN:
        lines = [*lines[:MAX_SHOWN], f"… and {len(lines) - MAX_SHOWN} more"]
    return RecipeError("\n".join(lines))


def _place(data: Data, detail: ErrorDetails) -> tuple[Where, bool]:
    """The detail's location without what pydantic adds (union members, '[key]'); whether a key is meant."""
    where: list[str | int] = []
    here = data
    for part in detail["loc"]:
        try:
            here = here[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            continue
        where.append(part)
    return tuple(where), detail["type"] == "extra_forbidden" or "[key]" in detail["loc"]


def _message(where: Where, detail: ErrorDetails) -> str:
    kind, text = detail["type"], detail["msg"]
    if kind == "extra_forbidden":
        return f"unknown key {where[-1]!r}; {nearest(str(where[-1]), _keys_at(where[:-1]))}"
    if kind == "missing":
        return f"the key {str(detail['loc'][-1])!r} is missing"
    if kind == "literal_error":
        return f"{detail['input']!r}: {nearest(str(detail['input']), _expected(detail))}"
    if kind == "string_type" and "FromStep" not in str(detail["loc"]) and isinstance(detail["input"], dict):
        return ""  # the other member of a union says it better
    if kind in {"model_type", "model_attributes_type"}:
        name = str(where[-1]) if where else "the recipe"
        return "" if isinstance(detail["input"], str) else f"{name} must be a mapping"
    if kind == "too_short" and detail["input"]:
        return ""  # an item of it is wrong, which has its own message
    if kind == "dict_type":
        return f"{where[-1]} must be a mapping"
    subject = f"{where[-1]}: " if where and isinstance(where[-1], str) else ""
    plain = text.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind == "string_pattern_mismatch":
        return f"{subject}{detail['input']!r} has not the form {detail['ctx']['pattern']}"
    return subject + plain[0].lower() + plain[1:]


def _expected(detail: ErrorDetails) -> list[str]:
    words = str(detail.get("ctx", {}).get("expected", ""))
    return [word.strip(" '") for word in words.replace(" or ", ",").split(",") if word.strip(" '")]


def _keys_at(where: Where) -> set[str]:
    """The keys that the model at that place knows."""
    model: type[pydantic.BaseModel] | None = Recipe
    for part in where:
        if isinstance(part, int) or model is None:
            continue
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        model = _model_in(fields[part].annotation) if part in fields else None
    return {field.alias or name for name, field in model.model_fields.items()} if model else set()


def _model_in(annotation: object) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    for part in typing.get_args(annotation):
        if found := _model_in(part):
            return found
    return None
