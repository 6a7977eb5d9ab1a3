"""Small JSON objects of a store: written in one form, strictly read, since others may have written them."""

from __future__ import annotations

import json
from typing import TypeVar, get_args

from pydantic import ValidationError

from aenv_run.digest import canonical_json
from aenv_run.errors import CorruptData, InvalidInput, Unsupported
from aenv_run.printable import printable
from aenv_run.types import Model

M = TypeVar("M", bound=Model)


def canonical(value: Model, what: str) -> bytes:
    """As it is stored; ``InvalidInput`` where a text of it is no Unicode."""
    try:
        return canonical_json(value)
    except UnicodeEncodeError:  # a lone surrogate, such as Python makes of a file name that is no UTF-8
        raise InvalidInput(f"{what} would have text that is no Unicode") from None


def parse_record(model: type[M], data: bytes, what: str) -> M:
    """A small JSON object. ``CorruptData`` for one that is none, ``Unsupported`` for one of a newer format."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        _refuse_newer(model, data, what)
        raise CorruptData(
            f"{what} is damaged: {first_error(error)}", fix="restore the file from a copy, or remove it"
        ) from None
    except InvalidInput as error:
        raise CorruptData(f"{what} is damaged: {error.message}", fix="restore the file from a copy") from None


def _refuse_newer(model: type[Model], data: bytes, what: str) -> None:
    """``Unsupported`` when the object only is of another format than this aenv knows."""
    field = model.model_fields.get("format")
    known = get_args(field.annotation) if field is not None else ()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    format = value.get("format") if isinstance(value, dict) else None
    if known and isinstance(format, str) and format.startswith("aenv.") and format not in known:
        raise Unsupported(
            f"{what} has the format {format[:80]!r}; this aenv knows {', '.join(map(repr, known))}",
            fix="use the version of aenv that wrote it, or a newer one",
        )


def first_error(error: ValidationError) -> str:
    """Where and why, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(printable(str(part))[:80] for part in first["loc"])  # a key may be anything
    return f"{where}: {first['msg']}" if where else str(first["msg"])
