"""The lineage of a name, drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aenv_run.catalog import Catalog
from aenv_run.catalog.graph import MAX_NODES, Graph, Node, as_dot, as_mermaid, as_text, graph
from aenv_run.cli.command import run
from aenv_run.errors import NotFound, TooLarge
from aenv_run.repository import Repository, manifest_key
from aenv_run.snapshot import Provenance, Snapshot
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId, Tag
from tests.bytes_half import capture, draft

NAME = Name("task")


class Made:
    """base -> deps -> (task:1, one -> task:2); another name at deps; a name elsewhere."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.repository = Repository(PosixStore(home / "repository"))
        self.catalog = Catalog(self.repository, by="x")
        self.base = self.commit("base", None)
        self.deps = self.commit("deps", self.base)
        self.one = self.commit('q"uo\\te\u202e', self.deps)
        self.two = self.commit("two", self.deps)
        self.three = self.commit("three", self.two)
        self.catalog.publish(NAME, self.one.id, [Tag("old")])
        self.catalog.publish(NAME, self.three.id, [Tag("latest"), Tag("stable")])
        self.catalog.publish(Name("dev"), self.deps.id)
        self.catalog.publish(Name("alone"), self.commit("alone", None).id)

    def commit(self, step: str, parent: Snapshot | None) -> Snapshot:
        made = draft(parent).model_copy(update={"provenance": Provenance(step=step)})
        return self.repository.commit(capture(self.home, step.encode()), made)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_the_tree(made: Made) -> None:
    ids = {s.provenance.step: s.id.short for s in (made.base, made.deps, made.one, made.two, made.three)}
    assert as_text(graph(made.catalog, "task")).splitlines() == [
        f"● {ids['base']} base",
        f"● {ids['deps']} deps  dev:1",
        f'├─● {made.one.id.short} q"uo\\te\ufffd  task:1 [old]',
        f"└─● {ids['two']} two",
        f"  ● {ids['three']} three  task:2 [latest, stable]",
    ]
    assert len(graph(made.catalog, "task:2").nodes) == 4 and len(graph(made.catalog, "task:old").nodes) == 3
    assert graph(made.catalog, made.deps.id).nodes == graph(made.catalog, "dev").nodes
    with pytest.raises(NotFound):
        graph(made.catalog, "none")


def test_mermaid_and_dot_keep_what_is_said_inside_quotes(made: Made) -> None:
    found = graph(made.catalog, "task")
    mermaid, dot = as_mermaid(found), as_dot(found)
    one, deps = made.one.id.short, made.deps.id.short
    assert f'  n{one}["{one} q#34;uo#92;te#65533;<br/>task:1 [old]"]' in mermaid.splitlines()
    assert f"  n{deps} --> n{one}" in mermaid and mermaid.startswith("flowchart TD\n")
    assert f'  n{one} [label="{one} q\\"uo\\\\te\ufffd\\ntask:1 [old]", style=filled' in dot
    assert f"  n{deps} -> n{one};" in dot and dot.endswith("}\n") and "\u202e" not in mermaid + dot


def test_what_cannot_be_read_is_a_node(made: Made) -> None:
    made.repository.store.delete(manifest_key(made.deps.id))
    lines = as_text(graph(made.catalog, "task")).splitlines()
    assert lines[0] == f"● {made.deps.id.short} unreadable  dev:1" and len(lines) == 4


def test_long_chains_and_the_bound(made: Made, tmp_path: Path) -> None:
    ids = [SnapshotId(f"{number:064x}") for number in range(MAX_NODES)]
    chain = Graph(
        reference="x",
        nodes=tuple(Node(id=id, parent=ids[at - 1] if at else None) for at, id in enumerate(ids)),
    )
    assert all(line.startswith("● ") for line in as_text(chain).splitlines())
    assert as_dot(chain).count(" -> ") == MAX_NODES - 1


def test_a_graph_that_is_too_large(made: Made) -> None:
    assert len(graph(made.catalog, "task", max_nodes=5).nodes) == 5
    with pytest.raises(TooLarge, match="more than 4") as caught:
        graph(made.catalog, "task", max_nodes=4)
    assert "NAME:VERSION" in caught.value.fix and graph(made.catalog, "task:2", max_nodes=4)


def test_commands(made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AENV_HOME", str(made.home))

    def said(*argv: str, code: int = 0) -> str:
        assert run(["catalog", "graph", *argv]) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert "task:2 [latest, stable]" in said("task")
    assert said("task", "--format", "mermaid").startswith("flowchart")
    assert [node["step"] for node in json.loads(said("task", "--json"))["nodes"]][:2] == ["base", "deps"]
    target = made.home / "lineage.dot"
    assert said("task", "--format", "dot", "--output", str(target)) == ""
    assert target.read_text().startswith("digraph")
    assert "exists already" in said("task", "--output", str(target), code=64)
    programs = made.home / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    assert "apt install graphviz" in said("task", "--format", "svg", code=69)
    (programs / "dot").write_text(
        "#!/bin/sh\n[ $1 = -Tsvg ] && echo '<svg/>' && read -r first && echo \"$first\"\n"
    )
    (programs / "dot").chmod(0o755)
    assert said("task", "--format", "svg") == "<svg/>\ndigraph lineage {\n"
