"""YAML with positions: plain data, and for each value where in the file it stands.

A recipe may come from a stranger's pull request, so size, depth and what aliases expand to are bounded.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from aenv_run.digest import digest_bytes
from aenv_run.errors import NotFound, RecipeError
from aenv_run.types import Digest

Data: TypeAlias = "bool | int | str | list[Data] | dict[str, Data] | None"
Where: TypeAlias = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_VALUES = 50_000
MAX_DEPTH = 32
#: Under these keys every scalar is text as written: ``PORT: 0080`` and ``python: 3.10`` stay what they look like.
TEXT_KEYS = frozenset({"vars", "env", "matrix"})


@dataclass(frozen=True)
class Mark:
    """A place in a file, counted from 1 as editors do."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class File:
    """A file that was read: the folder that relative paths in it are relative to, and its content's digest."""

    folder: Path
    digest: Digest


@dataclass(frozen=True)
class Document:
    """The file's data and the mark of each value (``marks``) and of each mapping key (``key_marks``).

    ``files`` are those that it was read from, by their names in marks: the recipe and its fragments.
    """

    file: str
    data: dict[str, Data]
    marks: dict[Where, Mark]
    key_marks: dict[Where, Mark]
    blocks: frozenset[Where] = frozenset()
    files: Mapping[str, File] = field(default_factory=dict)

    def mark(self, where: Where) -> Mark:
        """Where the value stands; of a missing value, the nearest enclosing one."""
        while where and where not in self.marks:
            where = where[:-1]
        return self.marks.get(where, Mark(self.file, 1, 1))

    def key_mark(self, where: Where) -> Mark:
        """Where the key that holds the value stands."""
        return self.key_marks.get(where) or self.mark(where)

    def folder(self, where: Where) -> Path:
        """What a relative path that stands there is relative to: the folder of its own file."""
        return self.files[self.mark(where).file if where else self.file].folder

    @property
    def digest(self) -> Digest:
        """Of the file; of several files, of all their digests in the order in which they count."""
        digests = [file.digest for file in self.files.values()]
        return digests[0] if len(digests) == 1 else digest_bytes("\n".join(digests).encode())

    def error(self, where: Where, message: str, *, fix: str = "", key: bool = False) -> RecipeError:
        """An error at that place: ``file:line:column: message``."""
        return RecipeError(f"{self.key_mark(where) if key else self.mark(where)}: {message}", fix=fix)


def is_text(value: str) -> bool:
    """Whether it is UTF-8 without NUL, as commands, variables and paths are.

    Half of a surrogate pair (``\\ud800`` in YAML, other bytes in an argument) is none.
    """
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def nearest(word: str, words: Iterable[str]) -> str:
    """A sentence that offers the closest of ``words``, or lists them."""
    known = sorted(words)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"valid here: {', '.join(known) or 'none'}"


def read_document(path: Path, *, shown: str | None = None) -> Document:
    """Read and bound the file; ``shown`` is its name in messages."""
    file = shown or str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"{file}: no such recipe", fix="give the path of a recipe file") from None
    except OSError as error:
        raise RecipeError(f"{file}:1:1: cannot read the recipe: {error.strerror}") from error
    return replace(parse_document(data, file), files={file: File(path.absolute().parent, digest_bytes(data))})


def parse_document(data: bytes, file: str) -> Document:
    """Parse bytes as one YAML document whose top is a mapping."""
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{file}:1:1: the recipe is larger than {MAX_BYTES // 1024} KiB")
    try:
        node = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{file}:{line}:1: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        line, column = (at.line + 1, at.column + 1) if at else (1, 1)
        raise RecipeError(f"{file}:{line}:{column}: YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{file}:1:1: YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise RecipeError(f"{file}:1:1: nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(node, MappingNode):
        raise RecipeError(f"{file}:1:1: a recipe is a mapping that starts with 'version: 1'")
    walk = _Walk(file)
    top = walk.mapping(node, (), 0, text=False)
    return Document(file, top, walk.marks, walk.key_marks, frozenset(walk.blocks))


class _Walk:
    """Turns nodes into data; every visit counts, so an alias bomb stops at ``MAX_VALUES``."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.marks: dict[Where, Mark] = {}
        self.key_marks: dict[Where, Mark] = {}
        self.blocks: set[Where] = set()
        self._visits = 0

    def value(self, node: Node, where: Where, depth: int, *, text: bool) -> Data:
        """The data of a node; remembers its mark."""
        self._count(node, depth)
        self.marks[where] = self._mark(node)
        if isinstance(node, MappingNode):
            return self.mapping(node, where, depth, text=text)
        if isinstance(node, SequenceNode):
            return [
                self.value(item, (*where, index), depth + 1, text=text) for index, item in enumerate(node.value)
            ]
        assert isinstance(node, ScalarNode)
        if node.style in {"|", ">"}:
            self.blocks.add(where)
        return self._scalar(node, text=text)

    def mapping(self, node: MappingNode, where: Where, depth: int, *, text: bool) -> dict[str, Data]:
        """A mapping with ``<<`` merged in (its own keys win) and no key twice."""
        self.marks.setdefault(where, self._mark(node))
        result: dict[str, Data] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
                continue
            if not isinstance(key_node, ScalarNode):
                raise RecipeError(f"{self._mark(key_node)}: a key must be plain text")
            key = self._text(key_node)
            if key in result:
                raise RecipeError(f"{self._mark(key_node)}: the key {key!r} stands here twice")
            self.key_marks[(*where, key)] = self._mark(key_node)
            result[key] = self.value(value_node, (*where, key), depth + 1, text=text or key in TEXT_KEYS)
        for source in merged:
            if not isinstance(source, MappingNode):
                raise RecipeError(f"{self._mark(source)}: '<<' takes a mapping")
            self._count(source, depth)
            self._merge(source, where, depth, result, text=text)
        return result

    def _merge(
        self, source: MappingNode, where: Where, depth: int, result: dict[str, Data], *, text: bool
    ) -> None:
        inner = _Walk(self.file)
        inner._visits = self._visits
        for key, value in inner.mapping(source, where, depth + 1, text=text).items():
            if key not in result:
                result[key] = value
                for found, kept in ((inner.marks, self.marks), (inner.key_marks, self.key_marks)):
                    head = (*where, key)
                    kept.update({at: mark for at, mark in found.items() if at[: len(head)] == head})
        self._visits = inner._visits

    def _scalar(self, node: ScalarNode, *, text: bool) -> Data:
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        value = self._text(node)
        if tag == "null":
            return "" if text else None
        if text or tag in {"str", "float", "timestamp", "value"}:
            return value
        if tag == "bool":
            return value.lower() in {"true", "yes", "on"}
        if tag == "int":
            try:
                return int(value.replace("_", ""), 10)
            except ValueError:
                return value
        raise RecipeError(f"{self._mark(node)}: the YAML tag {node.tag!r} is not used in recipes")

    def _text(self, node: ScalarNode) -> str:
        value: str = node.value
        if not is_text(value):
            raise RecipeError(f"{self._mark(node)}: a NUL or half of a surrogate pair is no text")
        return value

    def _count(self, node: Node, depth: int) -> None:
        self._visits += 1
        if self._visits > MAX_VALUES:
            raise RecipeError(f"{self._mark(node)}: the recipe expands to more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise RecipeError(f"{self._mark(node)}: nested deeper than {MAX_DEPTH} levels")

    def _mark(self, node: Node) -> Mark:
        return Mark(self.file, node.start_mark.line + 1, node.start_mark.column + 1)
