"""The base of what crosses the HTTP API, and the values that more than one of its models has."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

#: ``endAt`` of what never ends by itself: a hundred years after the epoch.
NEVER_S = 100 * 365.25 * 86400
_UPPER = {"id": "ID", "mb": "MB"}


def wire_name(name: str) -> str:
    """``sandbox_id`` is ``sandboxID``, ``memory_mb`` is ``memoryMB``, ``started_at`` is ``startedAt``."""
    first, *rest = name.split("_")
    return first + "".join(_UPPER.get(part, part.capitalize()) for part in rest)


class Asked(BaseModel):
    """A body that a caller sends: a field that is not known is refused by its name."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=wire_name, validate_by_alias=True, validate_by_name=False
    )


class Told(BaseModel):
    """A body that the API answers; what is None is left out."""

    model_config = ConfigDict(
        frozen=True, alias_generator=wire_name, validate_by_name=True, serialize_by_alias=True
    )


def _no_control(text: str) -> str:
    if "\0" in text:
        raise ValueError("it has a zero byte")
    return text


Text = Annotated[str, AfterValidator(_no_control)]
Strings = dict[Annotated[Text, Field(max_length=256)], Annotated[Text, Field(max_length=32768)]]


def _number(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("it is not a number")
    return value


#: As JSON has them: neither `"no"` nor `1` is a yes, neither `true` nor `"5"` is a number.
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, BeforeValidator(_number)]


def at(time_s: float | None) -> datetime:
    """A time of the record as the wire has it."""
    return datetime.fromtimestamp(NEVER_S if time_s is None else time_s, UTC)


def moment(text: str) -> datetime:
    """A time of the catalog; 1970 for one that cannot be read."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
