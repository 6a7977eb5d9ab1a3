"""A Dockerfile becomes a recipe: each instruction the steps that do as much, or an error at its line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from aenv_build.bases.image_documents import LABEL_PREFIX
from aenv_build.dockerfile.copies import BuildContext, is_archive, require_local, target_of
from aenv_build.dockerfile.runs import command_words, run_command
from aenv_build.dockerfile.source import Dockerfile, Instruction, heredoc_marks, raw_words
from aenv_build.dockerfile.stages import PLATFORM, Stage, Stages, arguments_of
from aenv_build.dockerfile.state import State
from aenv_build.dockerfile.words import expanded, json_list, pairs, split_flags
from aenv_build.language.expansion import Part, literal, render
from aenv_build.language.image_reference import parse_image
from aenv_run.errors import InvalidInput
from aenv_run.hooks import USER_PATTERN
from aenv_run.snapshot import OWN_LABELS

#: As AgentENV and the E2B SDK wait for what a Dockerfile starts, where nobody says better.
DEFAULT_READY = "sleep 20"

Step: TypeAlias = dict[str, object]


@dataclass(frozen=True)
class Options:
    """How to translate. ``ready``: as a recipe says it, None for the default. ``start``: whether CMD is."""

    name: str
    target: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    internet: bool = True
    start: bool = True
    ready: Mapping[str, object] | None = None
    machine: Mapping[str, object] = field(default_factory=dict)
    memory: bool | None = None


@dataclass(frozen=True)
class Translation:
    """The recipe, and what of the Dockerfile has no effect in it."""

    recipe: Mapping[str, object]
    warnings: tuple[str, ...]


def translate(file: Dockerfile, context: BuildContext, options: Options) -> Translation:
    """The recipe of the target stage; of other stages only what it needs."""
    return _Translator(file, context, options).all()


class _Translator:
    def __init__(self, file: Dockerfile, context: BuildContext, options: Options) -> None:
        self._file = file
        self._context = context
        self._options = options
        self._stages = Stages.of(file, options.arguments)
        self._states: dict[int, State] = {}
        self._steps: list[Step] = []
        self._ids: set[str] = set()
        self._bases: dict[str, str] = {}
        self._warnings: list[str] = []
        self._secrets: list[str] = []
        self._needs: list[str] | None = None
        self._state = State("", None)
        self._root = ""

    def all(self) -> Translation:
        """From the target on, depth first: what a stage copies from stands before it."""
        stages = self._stages.stages
        target = stages[-1] if not self._options.target else self._stages.find(self._options.target)
        if target is None:
            raise InvalidInput(f"the Dockerfile has no stage {self._options.target!r}")
        self._root = self._root_image(target)
        self._warnings += self._stages.undeclared()
        self._translate(target)
        state = self._states[target.number]
        self._start(state, target)
        recipe: dict[str, object] = {
            "version": 1,
            "name": self._options.name,
            "base": self._base(self._root, target.line),
        }
        machine = dict(self._options.machine)
        runs = any("run" in step for step in self._steps)
        machine |= {"internet": True} if runs and self._options.internet else {}
        recipe |= {"machine": machine} if machine else {}
        recipe |= {"secrets": self._secrets} if self._secrets else {}
        recipe |= {"steps": self._steps} if self._steps else {}
        return Translation({**recipe, "outputs": [self._output(state)]}, tuple(self._warnings))

    def _output(self, state: State) -> dict[str, object]:
        labels = dict(state.labels)
        for name, words in (("entrypoint", state.entrypoint), ("cmd", state.command)):
            if words:
                labels[LABEL_PREFIX + name] = json.dumps(list(words), ensure_ascii=False)
        if state.ports:
            labels[LABEL_PREFIX + "exposed-ports"] = ",".join(sorted(set(state.ports)))
        output: dict[str, object] = {"tags": ["latest"]}
        output |= {"from": state.tip} if state.tip is not None else {}
        output |= {"memory": self._options.memory} if self._options.memory is not None else {}
        return {**output, "labels": labels} if labels else output

    # -- stages --------------------------------------------------------------------------------------------

    def _root_image(self, stage: Stage) -> str:
        while stage.parent is not None:
            stage = self._stages.stages[stage.parent]
        return stage.image

    def _translate(self, stage: Stage) -> None:
        """The steps of a stage, after those of all that it needs."""
        if stage.number in self._states:
            return
        if stage.parent is not None:
            self._translate(self._stages.stages[stage.parent])
        for one in stage.instructions:
            for source in self._copied_stages(stage, one):
                self._translate(source)
        before = self._states.get(stage.parent) if stage.parent is not None else None
        state = before.child() if before is not None else self._fresh(stage)
        self._state = self._states[stage.number] = state
        self._needs = [state.tip] if state.tip is not None else []
        for one in stage.instructions:
            getattr(self, f"_{one.keyword.lower()}", self._refuse)(one)

    def _copied_stages(self, stage: Stage, one: Instruction) -> list[Stage]:
        if one.keyword not in {"COPY", "ADD"}:
            return []
        names = [value for name, value in split_flags(one.text)[0] if name == "from"]
        found = [self._stages.find(name) for name in names]
        return [each for each in found if each is not None and each.number < stage.number]

    def _fresh(self, stage: Stage) -> State:
        workdir = "/" if stage.image == "scratch" else None
        if stage.image == self._root:
            return State(stage.image, None, workdir=workdir)
        return State(stage.image, self._base_step(stage.image, stage.line), workdir=workdir)

    def _base_step(self, image: str, line: int) -> str:
        """The step that is that image."""
        if image not in self._bases:
            self._needs = None
            self._bases[image] = self._emit(line, {"base": self._base(image, line)}, "from")
        return self._bases[image]

    def _base(self, image: str, line: int) -> dict[str, object]:
        """As a recipe writes it."""
        wanted = self._options.images.get(image, image)
        if wanted == "scratch":
            return {"empty": True}
        for kind in ("snapshot", "archive"):
            if wanted.startswith(kind + ":"):
                return {kind: wanted.removeprefix(kind + ":")}
        if not wanted.startswith(("docker://", "oci:", "docker-archive:")):
            wanted = f"docker://{wanted}"
        try:
            parse_image(wanted)
        except ValueError as error:
            raise self._file.error(line, str(error)) from None
        return {"image": wanted}

    def _emit(self, line: int, step: Step, prefix: str = "line") -> str:
        id, number = f"{prefix}-{line}", 2
        while id in self._ids:
            id, number = f"{prefix}-{line}.{number}", number + 1
        self._ids.add(id)
        head: Step = {"id": id}
        if self._needs is not None and prefix != "from":
            head["needs"] = self._needs
        self._needs = None
        self._steps.append(head | step)
        return id

    def _step(self, one: Instruction, step: Step) -> None:
        self._state.tip = self._emit(one.line, step)

    # -- words ---------------------------------------------------------------------------------------------

    def _parts(self, one: Instruction, word: str) -> tuple[Part, ...]:
        try:
            return expanded(word, self._file.escape, self._state.lookup)
        except ValueError as error:
            raise self._file.error(one.line, f"{one.keyword}: {error}") from None

    def _text(self, one: Instruction, word: str) -> str:
        found = literal(self._parts(one, word))
        if found is None:
            raise self._file.error(
                one.line,
                f"{one.keyword} {word[:200]}: the value of a variable is not set in the Dockerfile",
                fix="variables of the image can be used in ENV and RUN; set it with ENV or ARG here",
            )
        return found

    def _flags(self, one: Instruction, known: set[str]) -> tuple[dict[str, str], str]:
        flags, rest = split_flags(one.text)
        for name, _ in flags:
            if name not in known:
                raise self._file.error(one.line, f"{one.keyword}: --{name} is not understood")
        return {name: self._text(one, value) for name, value in flags}, rest

    def _warn(self, one: Instruction, what: str) -> None:
        self._warnings.append(f"{self._file.file}:{one.line}: {one.keyword}: {what}")

    def _refuse(self, one: Instruction) -> None:
        raise self._file.error(one.line, f"{one.keyword} is not something that a recipe has")

    # -- instructions --------------------------------------------------------------------------------------

    def _run(self, one: Instruction) -> None:
        state = self._state
        flags, rest = split_flags(one.text)
        shown = " ".join([*(f"--{name}={self._text(one, value)}" for name, value in flags), rest])
        found = run_command(self._file, one, shown.strip(), state.shell, state.workdir)
        command: dict[str, object] = {"command": list(found.words)}
        arguments = {
            name: value for name, value in state.arguments.items() if value is not None and name not in state.env
        }
        command |= {"env": arguments} if arguments else {}
        step: Step = {"run": command}
        if found.caches:
            step["cache"] = [{"path": path, **({"id": id} if id else {})} for path, id in found.caches]
        if found.secrets:
            step["secrets"] = list(found.secrets)
            self._secrets += [name for name in found.secrets if name not in self._secrets]
        for warning in found.warnings:
            self._warn(one, warning)
        self._step(one, step)

    def _copy(self, one: Instruction) -> None:
        flags, rest = self._flags(one, {"chown", "chmod", "link", *(["from"] if one.keyword == "COPY" else [])})
        common: dict[str, object] = {"user": self._owner(one, flags.get("chown", "root"))}
        if mode := flags.get("chmod"):
            if not re.fullmatch(r"[0-7]{3,4}", mode):
                raise self._file.error(one.line, f"{one.keyword}: --chmod={mode}: write octal digits, such as 755")
            common["mode"] = mode
        words = json_list(rest)
        marks = [mark.group(0) for mark in heredoc_marks(rest, self._file.escape)] if words is None else []
        raw = words if words is not None else raw_words(rest, self._file.escape)
        if len(raw) < 2:
            raise self._file.error(one.line, f"{one.keyword} takes sources and a target")
        sources = [self._text(one, word) for word in raw[:-1] if word not in marks]
        to = target_of(self._text(one, raw[-1]), self._state.workdir)
        if to is None:
            raise self._file.error(
                one.line, f"{one.keyword}: where {raw[-1]} is, is not known: write an absolute path"
            )
        if len(raw) > 2 and not to.endswith("/"):
            raise self._file.error(
                one.line, f"{one.keyword}: several sources go into a directory: write {raw[-1]}/"
            )
        self._documents(one, to, common)
        if "from" in flags:
            self._copy_from(one, flags["from"], sources, to, common)
        elif sources:
            self._copy_here(one, sources, to, common)

    _add = _copy

    def _owner(self, one: Instruction, owner: str) -> str:
        if not re.fullmatch(USER_PATTERN, owner):
            raise self._file.error(one.line, f"{one.keyword}: {owner!r} is no user")
        return owner

    def _documents(self, one: Instruction, to: str, common: Mapping[str, object]) -> None:
        for document in one.heredocs:
            path = to + document.name if to.endswith("/") else to
            content = document.content
            if document.expands:
                content = self._text(one, f'"{self._unquoted(content)}"')
            mode = {"mode": str(common["mode"])[-3:]} if "mode" in common else {}
            self._step(one, {"write": {"to": path, "content": content, "user": common["user"], **mode}})

    def _unquoted(self, content: str) -> str:
        """As text in quotes: in a document quotes are text, and before any other sign an escape goes away."""
        escape = self._file.escape

        def kept(found: re.Match[str]) -> str:
            sign = found[1]
            return f'{escape}"' if sign is None else escape + sign if sign in (escape, '"', "$") else sign

        return re.sub(rf'{re.escape(escape)}(.)|"', kept, content, flags=re.DOTALL)

    def _copy_here(self, one: Instruction, sources: list[str], to: str, common: Mapping[str, object]) -> None:
        rules = {} if self._context.ignore is None else {"ignore": self._context.shown(self._context.ignore)}
        paths: list[str] = []
        for source in sources:
            if one.keyword == "ADD":
                require_local(self._file, one, source)
            found = self._context.find(source)
            if not found and re.search(r"[*?\[]", source):
                self._warn(one, f"{source} matches nothing")
            elif not found:
                raise self._file.error(
                    one.line,
                    f"{one.keyword}: nothing in the context is called {source}",
                    fix=f"the context is {self._context.root}; a .dockerignore may leave it out",
                )
            for path in found:
                shown = self._context.shown(path)
                if one.keyword == "ADD" and is_archive(self._file, one, path):
                    folder = to.rstrip("/") or "/"
                    self._step(one, {"copy": {"from": shown, "to": folder, "unpack": True, **common}})
                else:
                    paths.append(shown)
        if len(paths) > 1 and not to.endswith("/"):
            raise self._file.error(one.line, f"{one.keyword}: several files go into a directory: write {to}/")
        if paths:
            origin: str | list[str] = paths[0] if len(paths) == 1 else paths
            self._step(one, {"copy": {"from": origin, "to": to, **common, **rules}})

    def _copy_from(
        self, one: Instruction, name: str, sources: list[str], to: str, common: Mapping[str, object]
    ) -> None:
        stage = self._stages.find(name)
        if stage is not None and stage.number not in self._states:
            raise self._file.error(one.line, f"{one.keyword}: the stage {name!r} stands later in the file")
        step = self._states[stage.number].tip if stage is not None else None
        if step is None:
            held = self._needs
            step = self._base_step(stage.image if stage is not None else name, one.line)
            self._needs = held if held is not None else [self._state.tip] if self._state.tip else []
        for source in sources:
            path = "/" + source.lstrip("/")
            if re.search(r"[*?\[]", path) or ".." in path.split("/"):
                raise self._file.error(
                    one.line,
                    f"{one.keyword} --from={name} {source}: only whole names are copied out of a stage",
                    fix="name the file, or its directory",
                )
            self._step(one, {"copy": {"from": {"step": step, "path": path}, "to": to, **common}})

    def _env(self, one: Instruction) -> None:
        found = {name: self._parts(one, value) for name, value in self._pairs(one)}
        known = {name: literal(parts) for name, parts in found.items()}
        if None in known.values():
            rendered = {name: render(parts) for name, parts in found.items()}
            self._step(one, {"env": rendered, "expand": True})
        else:
            self._step(one, {"env": known})
        for name, value in known.items():
            self._state.unknown.discard(name)
            if value is None:
                self._state.unknown.add(name)
            self._state.env[name] = value

    def _pairs(self, one: Instruction) -> list[tuple[str, str]]:
        try:
            return pairs(one.text, self._file.escape)
        except ValueError as error:
            raise self._file.error(one.line, f"{one.keyword}: {error}") from None

    def _arg(self, one: Instruction) -> None:
        for name, default in arguments_of(self._file, one):
            if name in self._options.arguments:
                value: str | None = self._options.arguments[name]
            elif default is not None:
                value = self._text(one, default)
            else:
                value = self._stages.global_arguments.get(name, PLATFORM.get(name))
            self._state.arguments[name] = value

    def _label(self, one: Instruction) -> None:
        for name, value in self._pairs(one):
            label = self._text(one, name)
            if label.startswith(OWN_LABELS):
                raise self._file.error(one.line, f"LABEL: {label!r} is one of aenv's own")
            self._state.labels[label] = self._text(one, value)

    def _workdir(self, one: Instruction) -> None:
        path = self._text(one, one.text)
        to = target_of(path, self._state.workdir)
        if not path or to is None:
            raise self._file.error(one.line, f"WORKDIR {one.text[:200]}: where that is, is not known")
        to = to.rstrip("/") or "/"
        if to not in self._state.made | {"/"}:
            self._step(one, {"mkdir": {"path": to, "user": "root"}})
        self._step(one, {"workdir": to})
        if to.startswith("/"):
            self._state.workdir = to
            self._state.made.add(to)

    def _user(self, one: Instruction) -> None:
        self._step(one, {"user": self._owner(one, self._text(one, one.text))})

    def _shell(self, one: Instruction) -> None:
        words = json_list(one.text)
        if not words:
            raise self._file.error(one.line, 'SHELL takes a JSON list, such as ["/bin/bash", "-c"]')
        self._state.shell = tuple(words)

    def _cmd(self, one: Instruction) -> None:
        self._state.command = command_words(one.text, self._state.shell)
        self._state.command_is_own = True

    def _entrypoint(self, one: Instruction) -> None:
        self._state.entrypoint = command_words(one.text, self._state.shell)
        self._state.entrypoint_is_list = json_list(one.text) is not None
        if not self._state.command_is_own:
            self._state.command = ()

    def _expose(self, one: Instruction) -> None:
        ports = [self._text(one, word) for word in raw_words(one.text, self._file.escape)]
        self._state.ports += [port if "/" in port else f"{port}/tcp" for port in ports]

    def _healthcheck(self, one: Instruction) -> None:
        self._warn(one, "nothing asks for it; --ready says when what is started is up")

    def _stopsignal(self, one: Instruction) -> None:
        self._warn(one, "has no effect: a sandbox is not stopped by a signal")

    def _volume(self, one: Instruction) -> None:
        self._warn(one, "has no effect: what is there is part of the disk")

    def _maintainer(self, one: Instruction) -> None:
        self._state.labels["maintainer"] = one.text

    def _onbuild(self, one: Instruction) -> None:
        raise self._file.error(
            one.line, "ONBUILD is for images, and a recipe makes none", fix="write the instruction itself"
        )

    def _start(self, state: State, target: Stage) -> None:
        """What a container would run, left running in the memory of the snapshot."""
        command = state.command if state.entrypoint_is_list else ()
        words = [*state.entrypoint, *command]
        if not words or not self._options.start:
            return
        self._state = state
        self._needs = [state.tip] if state.tip is not None and self._steps[-1]["id"] != state.tip else None
        if state.tip is None:
            self._needs = []
        ready: Mapping[str, object] = self._options.ready or {"command": DEFAULT_READY}
        if state.root == "scratch" and self._options.ready is None:
            ready = {}
        line = max(
            (one.line for one in target.instructions if one.keyword in {"CMD", "ENTRYPOINT"}), default=target.line
        )
        step: Step = {"start": {"command": words}}
        state.tip = self._emit(line, step | ({"ready": dict(ready)} if ready else {}))
