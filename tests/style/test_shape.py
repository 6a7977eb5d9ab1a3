"""Sizes, names and documentation of the packages' source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.style.source import Module, imports, modules

FILE_LINES = 500  # the goal is 400
FUNCTION_LINES = 80  # the goal is 60
SAY_NOTHING = ("utils", "util", "helpers", "helper", "managers", "manager", "misc", "common")

# Module -> why its types cannot be named.
MAY_USE_ANY = {
    "aenv_build.language.templates": "overrides methods of jinja2, whose signatures use it",
    "aenv_build.schema": "a JSON Schema is free-form",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Module) -> Iterator[Function]:
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            yield node


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public classes, functions and methods; an override or a property's setter is documented elsewhere."""
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any(one.split(".")[-1] in ("override", "overload", "setter") for one in decorators):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            inherits = any(ast.unparse(base).split("[")[0] not in ("Protocol", "BaseModel") for base in node.bases)
            for name, member in public(node.body, f"{prefix}{node.name}."):
                if not (inherits and isinstance(member, Function)):
                    yield name, member


def test_files_are_short() -> None:
    long = [
        f"{module.path}: {lines} lines"
        for module in modules()
        if (lines := len(module.text.splitlines())) > FILE_LINES
    ]
    assert not long, f"files of more than {FILE_LINES} lines, split them by subject:\n" + "\n".join(long)


def test_functions_are_short() -> None:
    long = [
        f"{module.path}:{node.lineno} {node.name}: {lines} lines"
        for module in modules()
        for node in functions(module)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]
    assert not long, f"functions of more than {FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_names_say_something() -> None:
    vague = [
        module.path
        for module in modules()
        for part in module.name.split(".")
        if part in SAY_NOTHING or part.startswith("base_")
    ]
    assert not vague, "name these after what they hold:\n" + "\n".join(vague)


def test_types_are_named() -> None:
    untyped = [
        f"{module.path}:{line}"
        for module in modules()
        if module.name not in MAY_USE_ANY
        for line, name in imports(module)
        if name == "typing.Any"
    ]
    assert not untyped, "use object, a TypedDict or a model, or say why not in MAY_USE_ANY:\n" + "\n".join(untyped)


def test_what_is_public_is_documented() -> None:
    silent = [
        f"{module.path}:{node.lineno} {name}"
        for module in modules()
        for name, node in public(module.tree.body)
        if not ast.get_docstring(node)
    ]
    silent += [f"{module.path}: the module" for module in modules() if not ast.get_docstring(module.tree)]
    assert not silent, "no docstring:\n" + "\n".join(silent)
