"""Kinds of values in a recipe: sizes, durations, paths, commands; each says what is wrong with a bad one."""

from __future__ import annotations

import posixpath
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from aenv_build.language.image_reference import parse_image
from aenv_run.hooks import USER_PATTERN
from aenv_run.text import MAX_VARIABLES, environment, one_line

_SIZE = re.compile(r"([0-9]{1,9})(KiB|MiB|GiB|TiB)")
_MIB = {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024, "TiB": 1024 * 1024}
_TIME = re.compile(r"([0-9]{1,6})(s|m|h|d)?")
_SECONDS = {"d": 86400, "s": 1, "m": 60, "h": 3600, "": 1}


def _mebibytes(value: object) -> object:
    if isinstance(value, str) and (found := _SIZE.fullmatch(value)):
        size = int(found[1]) * _MIB[found[2]]
        if size != int(size):
            raise ValueError("must be whole MiB")
        return int(size)
    raise ValueError(f"{value!r} is not a size: write a whole number and a unit, such as 512MiB or 4GiB")


def seconds_of(value: object) -> int:
    """A duration in seconds; ``ValueError`` says how one is written."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        found = _TIME.fullmatch(str(value))
        if found and int(found[1]) > 0:
            return int(found[1]) * _SECONDS[found[2] or ""]
    raise ValueError(f"{value!r} is not a duration: write seconds or 90s, 10m, 2h, 7d")


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f"{value!r} must be an absolute path in the sandbox")
    return _inside(value)


def _inside(value: str) -> str:
    if ".." in value.split("/"):
        raise ValueError(f"{value!r} must not contain '..'")
    if "\0" in value or not value:
        raise ValueError("a path is not empty and has no NUL")
    return value


def image_name(value: str) -> str:
    """The name of a container image, checked."""
    parse_image(value)
    return value


def _env_name(value: str) -> str:
    if not value or "=" in value or "\0" in value:
        raise ValueError(f"{value!r} is not a name of an environment variable")
    return value


def _words(value: object) -> object:
    given = isinstance(value, str) or (isinstance(value, list | tuple) and bool(value))
    return value if given else _refuse("text (run by the shell) or a list of arguments, the program first")


def _refuse(what: str) -> object:
    raise ValueError(f"must be {what}")


def short_form(key: str) -> BeforeValidator:
    """``run: "x"`` is short for ``run: {command: "x"}``; the model sees the long form only."""

    def expand(value: object) -> object:
        return {key: value} if isinstance(value, str | list | int) else value

    return BeforeValidator(expand)


def _file_mode(value: object) -> object:
    if isinstance(value, int | str) and re.fullmatch(r"0?[0-7]{3}", str(value)):
        return str(value)[-3:]
    raise ValueError(f"{value!r} is not a file mode: write three octal digits, such as '0640'")


def _copy_mode(value: object) -> object:
    if isinstance(value, int | str) and re.fullmatch(r"[0-7]{3,4}", str(value)):
        return str(value).rjust(4, "0")
    raise ValueError(f"{value!r} is not a file mode: write three or four octal digits, such as '0640'")


_APT_PACKAGE = r"^[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~*-]+|/[a-z0-9.-]+)?$"


def _apt_package(value: str) -> str:
    if not re.match(_APT_PACKAGE, value):
        raise ValueError(f"{value!r} is not a package: write a name, name=version or name/release")
    return value


def _requirement(value: str) -> str:
    if not value.strip() or value.lstrip().startswith("-") or not value.isprintable():
        raise ValueError(f"{value!r} is not a package: write what pip install takes, without options")
    return value


def _git_url(value: str) -> str:
    if not re.match(r"(https?|git|ssh|file)://[^\s]|/[^\s]|[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:[^\s]", value):
        raise ValueError(f"{value!r} is no repository: write https://host/path, user@host:path, or a path inside")
    return _no_password(value)


def _no_password(value: str) -> str:
    if re.match(r"[a-z]+://[^/@\s]*:[^/@\s]*@", value):
        raise ValueError("no password belongs in a recipe: name it under 'secrets', and in the step")
    return value


def _cache_path(value: str) -> str:
    clean = posixpath.normpath("/" + value.strip("/"))
    if clean == "/" or clean.split("/")[1] in {"proc", "sys", "dev", "run"}:
        raise ValueError(f"{value!r} cannot be a cache: name a directory such as /root/.cache/pip")
    return clean


def _local_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"{value!r} is no URL: write http://localhost:8080/path")
    return value


def _file_path(value: str) -> str:
    if value.endswith("/"):
        raise ValueError(f"{value!r} names a directory; write the path of the file")
    return _inside(value)


SizeMib = Annotated[
    int,
    BeforeValidator(_mebibytes),
    WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,9}(KiB|MiB|GiB|TiB)$", "examples": ["512MiB", "4GiB"]}),
]
Seconds = Annotated[
    int,
    BeforeValidator(seconds_of),
    WithJsonSchema(
        {"type": ["string", "integer"], "pattern": "^[0-9]{1,6}(s|m|h|d)?$", "examples": ["90s", "10m"]}
    ),
]
Words = Annotated[
    str | tuple[str, ...],
    BeforeValidator(_words),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]
#: Checked where they are read, before templates count (fragments.py, matrix.py).
Paths = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
_SCALAR = {"type": ["string", "number", "boolean"]}
_CELLS = {"type": "array", "items": {"type": "object", "additionalProperties": _SCALAR, "minProperties": 1}}
Matrix = Annotated[
    dict[str, tuple[str | dict[str, str], ...]],
    WithJsonSchema(
        {
            "type": "object",
            "minProperties": 1,
            "properties": {"include": _CELLS, "exclude": _CELLS},
            "additionalProperties": {"type": "array", "items": _SCALAR, "minItems": 1},
        }
    ),
]
CachePath = Annotated[str, AfterValidator(_absolute), AfterValidator(_cache_path)]
SandboxPath = Annotated[str, AfterValidator(_absolute)]
RelativeOrAbsolute = Annotated[str, AfterValidator(_inside)]
#: Bounded so that, joined with the one before, it is still a path.
Workdir = Annotated[str, Field(max_length=1024), AfterValidator(one_line), AfterValidator(_inside)]
AbsoluteWorkdir = Annotated[Workdir, AfterValidator(_absolute)]
FilePath = Annotated[str, AfterValidator(_file_path)]
AbsoluteFilePath = Annotated[str, AfterValidator(_file_path), AfterValidator(_absolute)]
FileMode = Annotated[
    str, BeforeValidator(_file_mode), WithJsonSchema({"type": ["string", "integer"], "examples": ["0640"]})
]
CopyMode = Annotated[
    str, BeforeValidator(_copy_mode), WithJsonSchema({"type": ["string", "integer"], "examples": ["0640"]})
]
#: Of a copy: at least one path.
Sources = Annotated[tuple[str, ...], Field(min_length=1, max_length=1000)]
Requirement = Annotated[str, AfterValidator(_requirement)]
AptPackage = Annotated[
    str, AfterValidator(_apt_package), WithJsonSchema({"type": "string", "pattern": _APT_PACKAGE})
]
GitRef = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./+@-]{0,254}$")]
GitUrl = Annotated[str, AfterValidator(_git_url)]
LocalUrl = Annotated[str, AfterValidator(_local_url)]
Url = Annotated[str, Field(pattern=r"^https?://[^\s]+$"), AfterValidator(_no_password)]
Env = Annotated[
    dict[Annotated[str, AfterValidator(_env_name)], str],
    Field(max_length=MAX_VARIABLES),
    AfterValidator(environment),
]
SecretName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
StepId = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_.-]{0,62}[a-z0-9])?$")]
User = Annotated[str, Field(pattern=USER_PATTERN)]


class RecipeModel(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)
