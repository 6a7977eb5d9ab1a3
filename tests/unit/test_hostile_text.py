"""Text of a repository that others can write: each field has bounds and rules, and the error names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_build.bases.image_documents import parse_config
from aenv_build.cache.elsewhere import KeptResult
from aenv_build.language.load import load
from aenv_run.capture import Capture
from aenv_run.catalog.labels import LabelsRecord
from aenv_run.catalog.records import MovesPage, RemovedRecord, TagRecord, VersionRecord
from aenv_run.digest import canonical_json
from aenv_run.errors import AenvError, BaseUnavailable, CorruptData, InvalidInput
from aenv_run.garbage.leases import HolderLease, NodeMark
from aenv_run.garbage.state import GcState
from aenv_run.repository import Draft, Repository
from aenv_run.snapshot import Snapshot
from aenv_run.store.memory import MemoryStore
from aenv_run.stored_json import parse_record
from aenv_run.types import Architecture, Context, MachineSpec, Model

ZERO, ID = "sha256:" + "0" * 64, "0" * 64
WHEN = "2026-11-30T12:00:00Z"
OWNER = {"host": "a", "pid": 1, "start_ticks": 2, "place": "boot"}
VERSION = {"format": "aenv.version/2", "snapshot_id": ID, "created_at": WHEN, "by": "a@b"}
BUILT = {"base": "x", "builder": "aenv-build 1", "driver": "qemu", "host": "h", "at": WHEN, "verified": ["unit"]}
BUILT |= {"source_commit": "0" * 40}
MOVE = {"number": 1, "act": "tag", "at": WHEN, "by": "a@b", "from_version": None, "to_version": 1}
FACTS = {"driver": "qemu", "vmm_version": "10", "mode": "tcg", "cpu": "c", "kernel_digest": ZERO}
FACTS |= {"envd_digest": ZERO, "devices": "d", "tsc_khz": 0}
#: One honest object of each kind that lies in a repository.
HONEST: dict[type[Model], dict[str, object]] = {
    Snapshot: {
        "format": "aenv.snapshot/1",
        "architecture": "amd64",
        "machine": {"cpus": 1, "memory_mib": 512, "disk_mib": 64},
        "context": {"env": {"KEY": "a\nb"}, "workdir": "/srv/a b", "user": "1000:grp"},
        "disk": [{"digest": ZERO, "size_bytes": 1}],
        "memory": {"files": {"ram": {"digest": ZERO, "size_bytes": 1}}, "facts": FACTS},
        "labels": {"org.x/y": "{\n}"},
        "provenance": {
            "recipe_name": "x",
            "step": "s",
            "source_commit": "0" * 40,
            "builder": "b",
            "created_at": WHEN,
        },
    },
    VersionRecord: {**VERSION, "built": BUILT},
    RemovedRecord: {"format": "aenv.removed/2", "removed_at": WHEN, "by": "a@b", "version": VERSION},
    TagRecord: {"format": "aenv.tag/2", "version": 1, "moves": [MOVE]},
    MovesPage: {"format": "aenv.moves/1", "moves": [MOVE]},
    LabelsRecord: {"format": "aenv.labels/1", "labels": {"key": "value"}},
    KeptResult: {"snapshot_id": ID, "at": WHEN},
    HolderLease: {"format": "aenv.holder/1", "kind": "node", "owner": OWNER, "beat": 1, "held": {ID: ["a"]}},
    NodeMark: {"format": "aenv.node/1", "owner": OWNER, "home": "/h"},
    GcState: {"format": "aenv.gc/1", "token": "t", "owner": OWNER},
}
LONG, HUGE = "x" * 300, "x" * ((1 << 20) + 1)
NOT_LINES = ("a\0b", "a\nb", "a\x1b[2J", "a\x85b", "a\u2028b", HUGE)
#: Path of the field, values that are refused. A path that ends in "*": the key itself.
HOSTILE: list[tuple[type[Model], str, tuple[object, ...]]] = [
    (Snapshot, "context.workdir", (*NOT_LINES, "", "srv", "/" + "a" * 4096, "/\x7f")),
    (Snapshot, "context.user", (*NOT_LINES, "", LONG)),
    (Snapshot, "context.env.KEY", ("a\0b", HUGE, "x" * (128 << 10), 1)),
    (Snapshot, "context.env.*", ("", "A=B", "A\0B", HUGE)),
    (Snapshot, "context.env", ({f"V{number}": "" for number in range(5000)},)),
    (Snapshot, "labels.*", (*NOT_LINES, "")),
    (Snapshot, "labels.org.x/y", ("a\0b", HUGE)),
    (Snapshot, "labels", ({f"V{number}": "" for number in range(2000)},)),
    *[(Snapshot, f"provenance.{name}", (*NOT_LINES, LONG))
      for name in ("recipe_name", "step", "source_commit", "builder", "created_at")],
    *[(Snapshot, f"memory.facts.{name}", (*NOT_LINES, LONG))
      for name in ("driver", "vmm_version", "cpu", "devices")],
    (Snapshot, "memory.facts.tsc_khz", (-1, 10**30)),
    (Snapshot, "disk.0.size_bytes", (-1, 10**400)),
    (VersionRecord, "created_at", (*NOT_LINES, LONG)),
    (VersionRecord, "by", (*NOT_LINES, LONG)),
    *[(VersionRecord, f"built.{name}", (*NOT_LINES, LONG * 2))
      for name in ("base", "builder", "driver", "host", "at", "source_commit", "verified.0")],
    (RemovedRecord, "removed_at", NOT_LINES),
    (RemovedRecord, "by", NOT_LINES),
    (RemovedRecord, "version.created_at", NOT_LINES),
    (TagRecord, "moves.0.at", NOT_LINES),
    (TagRecord, "moves.0.by", NOT_LINES),
    (MovesPage, "moves.0.by", NOT_LINES),
    (MovesPage, "moves.0.number", (0, 10**30)),
    (LabelsRecord, "labels.key", (*NOT_LINES, LONG * 2)),
    (LabelsRecord, "labels.*", (*NOT_LINES, "")),
    (KeptResult, "at", ("2026-11-30T12:00:00", "yesterday", 10**400)),  # without a zone nothing can be compared
    (HolderLease, "owner.host", NOT_LINES),
    (HolderLease, "owner.place", NOT_LINES),
    (HolderLease, "owner.pid", (-1, 10**30)),
    (HolderLease, f"held.{ID}", ([HUGE], ["x"] * 10_000)),
    (HolderLease, "beat", (-1, 10**400)),
    (NodeMark, "home", (HUGE,)),
    (GcState, "token", NOT_LINES),
]  # fmt: skip


def changed(plain: dict[str, object], path: str, value: object) -> dict[str, object]:
    """A copy with another value at the path; keys may have dots."""
    made = json.loads(json.dumps(plain))
    at, rest = made, path
    while True:
        if rest == "*":
            at[value] = at.pop(next(iter(at)))
            return made  # type: ignore[no-any-return]
        known = [str(key) for key in (range(len(at)) if isinstance(at, list) else at)]
        key = max((key for key in known if rest == key or rest.startswith(f"{key}.")), key=len)
        index = int(key) if isinstance(at, list) else key
        if rest == key:
            at[index] = value
            return made  # type: ignore[no-any-return]
        at, rest = at[index], rest[len(key) + 1 :]


@pytest.mark.parametrize("kind", HONEST, ids=lambda kind: kind.__name__)
def test_honest_ones_are_read(kind: type[Model]) -> None:
    assert parse_record(kind, json.dumps(HONEST[kind]).encode(), "x")


@pytest.mark.parametrize(("kind", "path", "values"), HOSTILE, ids=lambda value: getattr(value, "__name__", None))
def test_each_field_is_bounded_and_named(kind: type[Model], path: str, values: tuple[object, ...]) -> None:
    for value in values:
        data = json.dumps(changed(HONEST[kind], path, value)).encode()
        with pytest.raises(CorruptData) as caught:
            parse_record(kind, data, "the object")
        message = caught.value.message
        field = path.removesuffix(".*").removesuffix(".KEY").removesuffix(".0")
        assert message.startswith("the object is damaged: ") and field in message, (path, message[:200])
        assert len(message) < 2000 and "\0" not in message and "\x1b" not in message


def strings(schema: dict[str, object], where: str, definitions: dict[str, dict[str, object]]) -> Iterator[str]:
    """Where the schema has text or a number without any bound."""
    if "$ref" in schema:
        yield from strings(definitions[str(schema["$ref"]).rsplit("/", 1)[1]], where, definitions)
    for part in ("anyOf", "allOf", "prefixItems"):
        for each in schema.get(part, ()):  # type: ignore[attr-defined]
            yield from strings(each, where, definitions)
    if schema.get("type") == "string" and not schema.keys() & {"maxLength", "pattern", "enum", "const", "format"}:
        yield where
    if schema.get("type") == "integer" and not schema.keys() >= {"minimum", "maximum"}:
        yield where
    for name, each in schema.get("properties", {}).items():  # type: ignore[attr-defined]
        yield from strings(each, f"{where}.{name}", definitions)
    for part in ("items", "additionalProperties", "propertyNames"):
        if isinstance(each := schema.get(part), dict):
            yield from strings(each, f"{where}.{part}", definitions)
    if schema.get("type") == "object" and "properties" not in schema:
        if not schema.keys() & {"maxProperties", "patternProperties"}:
            yield f"{where} (how many)"
        if not schema.keys() & {"propertyNames", "patternProperties"}:
            yield f"{where} (keys)"


#: What the schema does not show: it is looked at by a function, and tested above.
BY_FUNCTION = {"Snapshot.context.env (keys)", "Snapshot.context.env.additionalProperties"} | {
    f"Snapshot.hooks.{kind}.items.command.items" for kind in ("on_restore", "on_fork", "on_pause")
}


def test_no_field_is_without_a_bound() -> None:
    """The whole kind: also a field that somebody adds tomorrow."""
    unbounded = set()
    for kind in HONEST:
        schema = kind.model_json_schema()
        unbounded |= set(strings(schema, kind.__name__, schema.get("$defs", {})))
    assert unbounded - BY_FUNCTION == set()


def test_what_would_not_be_read_is_not_committed(tmp_path: Path) -> None:
    """Also where a part was copied with changes, which nobody looks at."""
    layer = tmp_path / "capture" / "layer"
    layer.parent.mkdir()
    layer.write_bytes(b"layer")
    context = Context().model_copy(update={"workdir": "/srv\nx"})
    draft = Draft(architecture=Architecture("amd64"), machine=MachineSpec(), context=context)
    store = MemoryStore()
    with pytest.raises(InvalidInput, match=r"context\.workdir"):
        Repository(store).commit(Capture(layer.parent, (layer,)), draft)
    assert not list(store.list("snapshots/"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('steps: [{workdir: "/srv\\nx"}]', "control character"),
        ('steps: [{run: {command: a, workdir: "/a\\u2028"}}]', "control character"),
        ('env: {A: "a\\0b"}', "NUL"),
        ('steps: [{env: {A: "a\\0b"}}]', "NUL"),
        ('outputs: [{labels: {"a\\nb": c}}]', "control character"),
        ('outputs: [{labels: {a: "\\0"}}]', "NUL"),
    ],
)
def test_a_recipe_cannot_make_them(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"version: 1\nname: x\nbase: {{snapshot: tiny}}\n{text}\n")
    with pytest.raises(AenvError, match=says) as caught:
        load(path)
    assert "recipe.yaml:4:" in caught.value.message


@pytest.mark.parametrize(
    "config", [{"WorkingDir": "/a\nb"}, {"User": "a\0b"}, {"Env": [f"A={HUGE}"]}, {"Labels": {"a\nb": ""}}]
)
def test_an_image_cannot_bring_them(config: dict[str, object]) -> None:
    document = {"os": "linux", "architecture": "amd64", "config": config}
    document["rootfs"] = {"type": "layers", "diff_ids": [ZERO]}
    with pytest.raises(BaseUnavailable):
        parse_config(json.dumps(document).encode(), "image")


def test_the_honest_snapshot_has_the_bytes_of_before() -> None:
    plain = HONEST[Snapshot]
    kept = json.loads(canonical_json(Snapshot.model_validate(plain)))
    assert {key: kept[key] for key in ("context", "labels")} == {key: plain[key] for key in ("context", "labels")}
