"""What callers write for a template or a snapshot, as the catalog has it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aenv_run.catalog.reference import Reference
from aenv_run.errors import NotFound
from aenv_run.types import Name, SnapshotId, Tag

#: Between a namespace and a name: the catalog's names have no slash.
NAMESPACE = "--"


@dataclass(frozen=True)
class ApiReference:
    """``text`` is what the catalog resolves; ``alias`` the name in it, None for an id."""

    text: str
    alias: str | None


def catalog_reference(written: str) -> ApiReference:
    """A snapshot's id, ``name``, ``name:tag``, ``name:version`` or ``namespace/name[:…]``, in any case.

    ``NotFound`` for what nothing can be called.
    """
    text = written.strip()
    if re.fullmatch(SnapshotId.pattern, text):
        return ApiReference(text, None)
    name, separator, part = text.partition(":")
    name = name.lower().replace("/", NAMESPACE)
    if (
        not re.fullmatch(Name.pattern, name)
        or Reference.parse(name).id_prefix is not None
        or (separator and not re.fullmatch(rf"[0-9]{{1,9}}|{Tag.pattern}", part))
    ):
        raise NotFound(f"template {written[:80]!r} not found: nothing can be called that")
    return ApiReference(f"{name}{separator}{part}", name)
