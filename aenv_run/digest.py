"""Canonical JSON and sha256 of bytes and files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel

from aenv_run.types import Digest

READ_BYTES = 1 << 20


def canonical_json(value: BaseModel) -> bytes:
    """The one byte form of a model: sorted keys, no spaces, UTF-8, no floats by convention, ``null`` kept.

    Two equal values always give equal bytes, so that an id can be the digest of them.
    """
    return json.dumps(
        value.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()


def digest_bytes(data: bytes) -> Digest:
    """sha256 of ``data``."""
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


def digest_file(path: Path) -> Digest:
    """sha256 of the file's content, holes read as zeros."""
    with path.open("rb") as file:
        return Digest("sha256:" + hashlib.file_digest(file, "sha256").hexdigest())
