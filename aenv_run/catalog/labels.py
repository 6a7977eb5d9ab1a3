"""Labels of a version: what people note about it afterwards, beside the labels that its snapshot has for ever.

A snapshot's labels are part of its id, and a version always means the same snapshot. So these are a record of
their own, as a tag is: they may change, and neither the version nor the snapshot does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field

from aenv_run.catalog.records import RACE_TRIES, Version, checked, named
from aenv_run.digest import canonical_json
from aenv_run.errors import Conflict, CorruptData, InvalidInput, NotFound, Unsupported
from aenv_run.repository import MAX_RECORD_BYTES, Repository
from aenv_run.store import StoreKey
from aenv_run.text import Line
from aenv_run.types import Model, Name

MAX_LABELS, MAX_KEY, MAX_VALUE = 64, 128, 512


class LabelsRecord(Model):
    """Content of ``refs/labels/<name>/<version>``."""

    format: Literal["aenv.labels/1"] = "aenv.labels/1"
    labels: dict[
        Annotated[Line, Field(min_length=1, max_length=MAX_KEY)], Annotated[Line, Field(max_length=MAX_VALUE)]
    ] = Field(max_length=MAX_LABELS)


def labels_key(name: Name, version: Version) -> StoreKey:
    """Where the labels of a version are."""
    return StoreKey(f"refs/labels/{name}/{checked(version)}")


class Labels:
    """Blocking and thread-safe, as the repository is."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._store = repository.store

    def of(self, name: Name, version: Version) -> dict[str, str]:
        """Empty where there are none."""
        record = self._repository.read_ref(labels_key(name, version), LabelsRecord)
        return dict(record.labels) if record else {}

    def keys(self, name: Name | None = None) -> set[tuple[Name, Version]]:
        """The versions (of one name) that have any."""
        under = "refs/labels/"
        found = self._store.list(under if name is None else f"{under}{name}/")
        return {pair for info in found if (pair := named(info.key, under)) is not None}

    def change(
        self, name: Name, version: Version, new: Mapping[str, str], without: Iterable[str]
    ) -> dict[str, str]:
        """Set ``new``, remove ``without``; all that it has then. Of two at once neither loses the other's."""
        for key, value in new.items():
            _require_label(key, value)
        lost = set(without)
        for _ in range(RACE_TRIES):
            present = self._read_bytes(labels_key(name, version))
            before: dict[str, str] = {}
            with suppress(CorruptData):  # a damaged record may be replaced
                before = self.of(name, version)
            after = {key: value for key, value in {**before, **new}.items() if key not in lost}
            if len(after) > MAX_LABELS:
                raise InvalidInput(
                    f"{name}:{version} would have {len(after)} labels, more than {MAX_LABELS}",
                    fix="remove some with --delete",
                )
            data = canonical_json(LabelsRecord(labels=after))
            if len(data) > MAX_RECORD_BYTES:
                raise InvalidInput(
                    f"the labels of {name}:{version} would have {len(data)} bytes, more than {MAX_RECORD_BYTES}",
                    fix="make them shorter, or remove some with --delete",
                )
            if data == present or (present is None and not after):
                return after
            if self._store.swap(labels_key(name, version), data, expected=present):
                return after
        raise Conflict(f"the labels of {name}:{version} are being changed by others all the time", fix="try again")

    def shown(self, name: Name, version: Version) -> tuple[dict[str, str], str | None]:
        """Them, or why they cannot be read."""
        try:
            return self.of(name, version), None
        except (CorruptData, Unsupported) as error:
            return {}, error.message

    def _read_bytes(self, key: StoreKey) -> bytes | None:
        try:
            return self._store.read(key, limit_bytes=MAX_RECORD_BYTES)
        except NotFound:
            return None


def _require_label(key: str, value: str) -> None:
    shown = repr(key[:80])
    if not 0 < len(key) <= MAX_KEY or not key.isprintable() or any(c in key for c in "= \t"):
        raise InvalidInput(
            f"{shown} is no key of a label", fix=f"1 to {MAX_KEY} printable characters without = and spaces"
        )
    if len(value) > MAX_VALUE or not value.isprintable():
        raise InvalidInput(
            f"the value of the label {shown} is too long or not printable", fix=f"at most {MAX_VALUE} characters"
        )
