"""The lineage of a name as a graph, and as text, Mermaid and DOT."""

from __future__ import annotations

import re
from collections.abc import Callable

from aenv_run.catalog.names import Catalog
from aenv_run.catalog.reference import Reference
from aenv_run.errors import CorruptData, NotFound, TooLarge, Unsupported
from aenv_run.printable import printable
from aenv_run.types import Model, SnapshotId

MAX_NODES = 2000
MAX_WORDS = 80


class Node(Model):
    """A snapshot of the graph. ``versions`` and ``tags`` are those of every name; ``problem``: unreadable."""

    id: SnapshotId
    parent: SnapshotId | None = None
    step: str = ""
    has_memory: bool = False
    versions: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def words(self) -> tuple[str, str]:
        """What it is and what people call it, on two lines."""
        facts = [self.id.short, self.step, "with memory" if self.has_memory else ""]
        facts.append("unreadable" if self.problem else "")
        tags = f"[{', '.join(self.tags)}]" if self.tags else ""
        return _short(" ".join(part for part in facts if part)), _short(" ".join([*self.versions, tags]).strip())


class Graph(Model):
    """Parents before their children."""

    reference: str
    nodes: tuple[Node, ...]


def graph(catalog: Catalog, reference: str, *, max_nodes: int = MAX_NODES) -> Graph:
    """The lineages of all versions of a name, or of one version or tag, together."""
    wanted = Reference.parse(reference)
    if wanted.name is None:
        starts = [catalog.resolve(reference).snapshot_id]
    elif wanted.version is None and wanted.tag is None:
        starts = [entry.snapshot_id for entry in catalog.entries(wanted.name) if entry.snapshot_id is not None]
    else:
        starts = [catalog.resolve(reference).snapshot_id]
    versions: dict[SnapshotId, list[str]] = {}
    tags: dict[SnapshotId, list[str]] = {}
    for entry in catalog.entries():
        if entry.snapshot_id is not None:
            versions.setdefault(entry.snapshot_id, []).append(entry.reference)
            tags.setdefault(entry.snapshot_id, []).extend(entry.tags)
    nodes: dict[SnapshotId, Node] = {}
    for start in starts:
        at: SnapshotId | None = start
        while at is not None and at not in nodes:
            if len(nodes) >= max_nodes:
                raise TooLarge(
                    f"the graph of {reference} has more than {max_nodes} snapshots",
                    fix="draw that of one version: aenv catalog graph NAME:VERSION",
                )
            node = _node(catalog, at)
            nodes[at] = node.model_copy(
                update={"versions": tuple(versions.get(at, ())), "tags": tuple(dict.fromkeys(tags.get(at, ())))}
            )
            at = node.parent
    return Graph(reference=reference, nodes=_in_order(nodes))


def _node(catalog: Catalog, id: SnapshotId) -> Node:
    try:
        snapshot = catalog.repository.snapshot(id)
    except (NotFound, CorruptData, Unsupported) as error:
        return Node(id=id, problem=error.message)
    step = snapshot.provenance.step or snapshot.provenance.recipe_name or ""
    return Node(id=id, parent=snapshot.parent, step=step, has_memory=snapshot.memory is not None)


def _in_order(nodes: dict[SnapshotId, Node]) -> tuple[Node, ...]:
    """Each tree from its root down; children in the order in which they were found."""
    children = _children(tuple(nodes.values()))
    ordered: list[Node] = []
    waiting = list(reversed(children.get(None, [])))
    while waiting:
        node = waiting.pop()
        ordered.append(node)
        waiting += reversed(children.get(node.id, []))
    return tuple(ordered)


def _children(nodes: tuple[Node, ...]) -> dict[SnapshotId | None, list[Node]]:
    known = {node.id for node in nodes}
    children: dict[SnapshotId | None, list[Node]] = {}
    for node in nodes:
        children.setdefault(node.parent if node.parent in known else None, []).append(node)
    return children


def as_text(found: Graph) -> str:
    """A tree; an only child stands below its parent without being moved in, so that long chains stay readable."""
    children = _children(found.nodes)
    lines: list[str] = []
    waiting = [(node, "", "") for node in reversed(children.get(None, []))]
    while waiting:
        node, first, rest = waiting.pop()
        lines.append(f"{first}● {'  '.join(part for part in node.words if part)}")
        below = children.get(node.id, [])
        if len(below) == 1:
            waiting.append((below[0], rest, rest))
        for index, child in enumerate(reversed(below) if len(below) > 1 else ()):
            corner, bar = ("└─", "  ") if index == 0 else ("├─", "│ ")
            waiting.append((child, rest + corner, rest + bar))
    return "\n".join(lines) + "\n"


def as_mermaid(found: Graph) -> str:
    """A flowchart, for Markdown."""
    lines = ["flowchart TD"]
    for node in found.nodes:
        label = "<br/>".join(re.sub(r"[^A-Za-z0-9 .,:_\-\[\]]", _entity, part) for part in node.words if part)
        lines.append(f'  n{node.id.short}["{label}"]')
    lines += [f"  n{parent} --> n{child}" for parent, child in _edges(found)]
    return "\n".join(lines) + "\n"


def as_dot(found: Graph) -> str:
    """For Graphviz."""
    lines = ["digraph lineage {", '  node [shape=box, fontname="sans-serif"];']
    for node in found.nodes:
        label = r"\n".join(part.replace("\\", r"\\").replace('"', r"\"") for part in node.words if part)
        style = ", style=filled, fillcolor=lightgrey" if node.versions else ""
        lines.append(f'  n{node.id.short} [label="{label}"{style}];')
    lines += [f"  n{parent} -> n{child};" for parent, child in _edges(found)]
    return "\n".join([*lines, "}"]) + "\n"


FORMATS: dict[str, Callable[[Graph], str]] = {"text": as_text, "mermaid": as_mermaid, "dot": as_dot}


def _edges(found: Graph) -> list[tuple[str, str]]:
    known = {node.id for node in found.nodes}
    return [(n.parent.short, n.id.short) for n in found.nodes if n.parent is not None and n.parent in known]


def _entity(match: re.Match[str]) -> str:
    return f"#{ord(match[0])};"


def _short(text: str) -> str:
    line = printable(text)
    return line if len(line) <= MAX_WORDS else line[: MAX_WORDS - 1] + "…"
