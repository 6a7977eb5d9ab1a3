"""The steps of a build, as SDKs send them, as a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aenv_run.api.templates.archives import Packed
from aenv_run.api.templates.records import Build
from aenv_run.api.wire.templates import BuildAsked, StepAsked
from aenv_run.errors import InvalidInput
from aenv_run.hooks import USER_PATTERN
from aenv_run.recipe_literal import literal
from aenv_run.snapshot import OWN_LABELS

DEFAULT_READY = "sleep 20"
NO_EFFECT = {
    "EXPOSE": "EXPOSE has no effect: every port of a sandbox can be reached",
    "VOLUME": "VOLUME has no effect: its directory is part of the template, as all others are",
}
READY_TIMEOUT = "10m"
#: What a template was started with, for templates that are made from it.
START_LABEL, READY_LABEL = "aenv.template.start", "aenv.template.ready"
BASE, FINALIZE = "base", "finalize"
#: By the image's own programs, or where it has none by the files themselves.
_MAKE_USER = """\
id -u "$1" >/dev/null 2>&1 && exit 0
useradd -m -s /bin/bash "$1" 2>/dev/null && exit 0
adduser -D "$1" 2>/dev/null && exit 0
n=1000
while grep -q "^[^:]*:[^:]*:$n:" /etc/passwd /etc/group; do n=$((n + 1)); done
echo "$1:x:$n:$n::/home/$1:/bin/sh" >>/etc/passwd
echo "$1:x:$n:" >>/etc/group
mkdir -p "/home/$1" && chown "$n:$n" "/home/$1"
"""
_VARIABLE = re.compile(r"\$(\{[A-Za-z_][A-Za-z0-9_]*\}|[A-Za-z_][A-Za-z0-9_]*)|\$")
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
Words = list[str]


@dataclass(frozen=True)
class From:
    """What a build begins with: a base as a recipe has it, and what its template was started with."""

    base: Mapping[str, object]
    start: str | None = None
    ready: str | None = None

    @property
    def is_snapshot(self) -> bool:
        """Whether its disk has a size already."""
        return "snapshot" in self.base


@dataclass
class RecipeWriter:
    """Writes one recipe. ``packed``: what the COPY with that number takes."""

    build: Build
    begin: From
    packed: Mapping[int, Packed]
    internet: bool
    memory: bool
    steps: list[dict[str, object]] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)
    #: Pairs of a step's number and what its caller should know.
    notes: list[tuple[str, str]] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    env: set[str] = field(default_factory=set)
    labels: dict[str, str] = field(default_factory=dict)
    forced: bool = False

    def recipe(self, asked: BuildAsked) -> str:
        """The file's text (JSON, which is YAML). ``InvalidInput`` names a step that is wrong."""
        for number, step in enumerate(asked.steps or (), start=1):
            self.forced = self.forced or bool(step.force)
            verb = _VERBS.get(step.type.upper())
            if verb is None:
                raise InvalidInput(f"step {number}: there is no step of the type {step.type!r}")
            if step.files_hash is not None and not needs_archive(step):
                raise InvalidInput(f"step {number}: {step.type} takes no files: leave filesHash out")
            verb(self, number, step)
        self._start(asked)
        machine: dict[str, object] = {
            "cpus": self.build.cpus, "memory": f"{self.build.memory_mib}MiB", "internet": self.internet,
        }  # fmt: skip
        if not self.begin.is_snapshot:
            machine["disk"] = f"{self.build.disk_mib}MiB"
        output = {"tags": list(self.build.tags), "memory": self.memory, "labels": self.labels}
        recipe = {
            "version": 1, "name": str(self.build.template), "base": self.begin.base, "machine": machine,
            "steps": self.steps, "outputs": [output],
        }  # fmt: skip
        return as_yaml(literal(recipe))

    def _add(self, number: int, step: Mapping[str, object], shown: str = "") -> None:
        id = f"step-{number}"
        if any(one["id"] == id for one in self.steps):
            id = f"step-{number}.{sum(str(one['id']).startswith(id) for one in self.steps) + 1}"
        self.steps.append({"id": id, **step, **(self._salt() if "run" in step else {})})
        self.shown[id] = shown

    def _salt(self) -> dict[str, object]:
        """For the first command after ``force``; the later ones are run anew because of it.

        What is copied needs none: the result follows from the files alone.
        """
        forced, self.forced = self.forced, False
        return {"salt": self.build.build_id} if forced else {}

    def _run(self, number: int, step: StepAsked) -> None:
        if not 1 <= len(step.args) <= 2:
            raise InvalidInput(f"step {number}: RUN takes a command, and perhaps a user")
        run: dict[str, object] = {"command": in_shell(step.args[0])}
        if len(step.args) == 2 and step.args[1]:
            run["user"] = _user(number, step.args[1])
        if self.arguments:
            run["env"] = dict(self.arguments)
        self._add(number, {"run": run}, f"RUN {step.args[0]}")

    def _copy(self, number: int, step: StepAsked) -> None:
        packed = self.packed[number]
        if len(step.args) > 4:
            raise InvalidInput(f"step {number}: COPY takes a source, a destination, a user and a mode")
        source, dest, user, mode = (*step.args, "", "", "", "")[:4]
        target = dest if dest else "./"
        if not packed.is_file:
            target = target.rstrip("/") or ("/" if target.startswith("/") else ".")
        copy: dict[str, object] = {"from": str(packed.path), "to": _path(number, target)}
        copy |= {} if packed.is_file else {"unpack": True}
        copy |= {"user": _user(number, user)} if user else {}
        if mode:
            if not re.fullmatch(r"0?[0-7]{3,4}", mode):
                raise InvalidInput(f"step {number}: {mode[:20]!r} is not a file mode")
            copy["mode"] = mode[-4:]
        self._add(number, {"copy": copy}, f"COPY {source} {dest}")

    def _env(self, number: int, step: StepAsked) -> None:
        values = _pairs(number, step)
        self.env |= values.keys()
        for name in values:
            self.arguments.pop(name, None)
        if any("$" in value for value in values.values()):
            kept = {name: _VARIABLE.sub(lambda m: m[0] if m[1] else "$$", value) for name, value in values.items()}
            self._add(number, {"env": kept, "expand": True}, f"ENV {' '.join(values)}")
        else:
            self._add(number, {"env": values}, f"ENV {' '.join(values)}")

    def _arg(self, number: int, step: StepAsked) -> None:
        self.arguments |= {name: value for name, value in _pairs(number, step).items() if name not in self.env}

    def _label(self, number: int, step: StepAsked) -> None:
        found = _pairs(number, step)
        if own := [name for name in found if name.startswith(OWN_LABELS)]:
            raise InvalidInput(f"step {number}: the label {own[0][:80]!r} is one of aenv's own")
        self.labels |= found

    def _workdir(self, number: int, step: StepAsked) -> None:
        path = _path(number, _one(number, step))
        self._add(number, {"mkdir": path}, f"WORKDIR {path}")
        self._add(number, {"workdir": path})

    def _user_step(self, number: int, step: StepAsked) -> None:
        user = _user(number, _one(number, step))
        name = user.partition(":")[0]
        if not name.isdecimal() and name != "root":
            make: Words = ["/bin/sh", "-c", _MAKE_USER, "sh", name]
            self._add(number, {"run": {"command": make, "user": "root", "workdir": "/"}}, f"USER {user}")
        self._add(number, {"user": user})

    def _nothing(self, number: int, step: StepAsked) -> None:
        self.notes.append((str(number), NO_EFFECT[step.type.upper()]))

    def _start(self, asked: BuildAsked) -> None:
        start = asked.start_cmd or self.begin.start
        ready = asked.ready_cmd or (self.begin.ready if not asked.start_cmd else None)
        if not start and not ready:
            return
        self.labels |= {START_LABEL: start} if start else {}
        self.labels |= {READY_LABEL: ready} if ready else {}
        command = in_shell(start) if start else ["/bin/sh", "-c", ":"]
        step = {"start": {"command": command}, "ready": {"command": in_shell(ready or DEFAULT_READY)}}
        self.steps.append({"id": FINALIZE, **step, "timeout": READY_TIMEOUT, **self._salt()})
        self.shown[FINALIZE] = f"START {start or ''}".strip()


def as_yaml(value: object) -> str:
    """JSON that YAML reads as the same: what it would take for the end of a line, or refuse, is escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=1)
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def in_shell(command: str) -> Words:
    """As a login shell runs it: bash, or sh where the image has none."""
    choose = 'command -v bash >/dev/null 2>&1 && exec bash -lc "$1"; exec sh -lc "$1"'
    return ["/bin/sh", "-c", choose, "sh", command]


def needs_archive(step: StepAsked) -> bool:
    """Whether it copies from the client's folder."""
    return step.type.upper() in {"COPY", "ADD"}


def _pairs(number: int, step: StepAsked) -> dict[str, str]:
    args: Sequence[str] = step.args
    if len(args) == 1 and "=" in args[0]:
        args = args[0].split("=", 1)
    if not args or len(args) % 2:
        raise InvalidInput(f"step {number}: {step.type} takes names and values in turn")
    found = dict(zip(args[::2], args[1::2], strict=True))
    for name in found:
        if not name or "=" in name:
            raise InvalidInput(f"step {number}: {name[:80]!r} is not a name of a variable")
    return found


def _one(number: int, step: StepAsked) -> str:
    if len(step.args) != 1 or not step.args[0]:
        raise InvalidInput(f"step {number}: {step.type} takes one argument")
    return step.args[0]


def _user(number: int, user: str) -> str:
    if not re.fullmatch(USER_PATTERN, user):
        raise InvalidInput(f"step {number}: {user[:80]!r} is not a user")
    return user


def _path(number: int, path: str) -> str:
    if ".." in path.split("/"):
        raise InvalidInput(f"step {number}: {path[:200]!r} must not contain '..'")
    return path


Verb = Callable[[RecipeWriter, int, StepAsked], None]
_VERBS: Mapping[str, Verb] = {
    "RUN": RecipeWriter._run,
    "COPY": RecipeWriter._copy,
    "ADD": RecipeWriter._copy,
    "ENV": RecipeWriter._env,
    "ARG": RecipeWriter._arg,
    "LABEL": RecipeWriter._label,
    "WORKDIR": RecipeWriter._workdir,
    "USER": RecipeWriter._user_step,
    "EXPOSE": RecipeWriter._nothing,
    "VOLUME": RecipeWriter._nothing,
}
