"""The manifest: canonical form, id, limits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from aenv_run.digest import canonical_json
from aenv_run.snapshot import Blob, MemoryPart, Snapshot
from aenv_run.types import Architecture, Digest, MachineSpec
from tests.bytes_half import FACTS

EXAMPLE = Path(__file__).parent.parent.parent / "docs" / "snapshot-format.md"
KEY = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=20)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


def blob(content: bytes) -> Blob:
    return Blob(digest=Digest("sha256:" + hashlib.sha256(content).hexdigest()), size_bytes=len(content))


def snapshot(**labels: str) -> Snapshot:
    return Snapshot(
        architecture=Architecture("amd64"), machine=MachineSpec(), disk=(blob(b"base"),), labels=labels
    )


@given(labels=st.dictionaries(KEY, TEXT, max_size=4))
def test_canonical_form_survives_a_round_trip(labels: dict[str, str]) -> None:
    value = snapshot(**{}).model_copy(update={"labels": labels})
    data = canonical_json(value)
    again = Snapshot.model_validate_json(data)
    assert again == value and canonical_json(again) == data
    assert again.id == hashlib.sha256(data).hexdigest()


@given(labels=st.dictionaries(KEY, TEXT, min_size=2, max_size=4))
def test_the_order_of_keys_does_not_count(labels: dict[str, str]) -> None:
    backwards = dict(reversed(list(labels.items())))
    one, two = (snapshot().model_copy(update={"labels": some}) for some in (labels, backwards))
    assert one.id == two.id


def test_the_order_of_layers_counts() -> None:
    layers = (blob(b"1"), blob(b"2"))
    one, two = (snapshot().model_copy(update={"disk": disk}) for disk in (layers, layers[::-1]))
    assert one.id != two.id


@pytest.mark.parametrize(
    "change", [{"unknown": 1}, {"disk": []}, {"format": "x"}, {"parent": "abc"}, {"machine": {}}]
)
def test_unknown_and_bad_fields_are_refused(change: dict[str, object]) -> None:
    value = json.loads(canonical_json(snapshot())) | change
    if change == {"machine": {}}:
        value["machine"] = {"cpus": 0}
    with pytest.raises(ValidationError):
        Snapshot.model_validate_json(json.dumps(value))


def test_blobs_are_disk_then_memory() -> None:
    memory = MemoryPart(files={"ram": blob(b"r")}, facts=FACTS)
    value = snapshot().model_copy(update={"memory": memory})
    assert value.blobs() == (blob(b"base"), blob(b"r"))


def test_the_documented_example_has_the_documented_id() -> None:
    text = EXAMPLE.read_text()
    example = text.split("```json\n", 1)[1].split("```", 1)[0]
    value = Snapshot.model_validate_json(example)
    assert f"`{value.id}`" in text
    assert f"`{len(canonical_json(value))} bytes`" in text
