"""Recipe -> Plan: the graph of stages, each with its one state parent, its context and its key. A pure value."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from aenv_build.bases.image import ResolvedImage
from aenv_build.language.document import Where
from aenv_build.language.expansion import expand
from aenv_build.language.load import Source
from aenv_build.language.recipe import Output, Step
from aenv_build.language.verbs import Copy, FromStep, Run, Verify
from aenv_build.planning.base import Bases, BaseStage, FoundBase
from aenv_build.planning.files import CopiedFiles, Readings
from aenv_build.planning.graph import Graph
from aenv_build.planning.ignore import Ignore
from aenv_build.planning.install import require_alone
from aenv_build.planning.keys import HostFacts, Inputs, fields, inputs
from aenv_run.errors import AenvError, InvalidInput, Unsupported
from aenv_run.hooks import Hooks
from aenv_run.snapshot import MAX_DISK_LAYERS, Snapshot
from aenv_run.types import Context, Digest, MachineSpec, Name, SnapshotId, StageKey

DEFAULT_MACHINE = MachineSpec(cpus=1, memory_mib=512, disk_mib=4096)


@dataclass(frozen=True)
class Stage:
    """One step in its place. ``parent`` is the id of the step whose state it starts from, None for the base.

    ``context`` is how commands run in this step and after it. ``memory``: its state has running processes.
    """

    index: int
    step: Step
    parent: str | None
    waits: tuple[str, ...]
    inputs: Inputs
    context: Context
    memory: bool
    depth: int
    files: CopiedFiles | None = None
    #: The base that it or a step below it brought; None is the recipe's.
    base: BaseStage | None = None

    @property
    def id(self) -> str:
        """The step's id."""
        return self.step.id

    @property
    def key(self) -> StageKey:
        """The key of the state that it leaves; a step that changes the context only leaves its parent's."""
        return self.inputs.key

    @property
    def makes_state(self) -> bool:
        """Whether a snapshot is committed."""
        return self.step.verb in Step.STATES

    @property
    def is_base(self) -> bool:
        """Whether it is a base itself: no state is below it, and no machine makes it."""
        return self.step.base is not None


@dataclass(frozen=True)
class PlannedOutput:
    """A state, how to run in it, and the name it gets."""

    output: Output
    name: Name
    state: str | None
    inputs: Inputs
    context: Context
    memory: bool
    hooks: Hooks | None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> StageKey:
        """The digest of all inputs."""
        return self.inputs.key


@dataclass(frozen=True)
class Plan:
    """All that a build will do. ``stages`` are in an order in which each follows what it needs."""

    source: Source
    machine: MachineSpec
    internet: bool
    base: BaseStage
    stages: Mapping[str, Stage]
    outputs: tuple[PlannedOutput, ...]

    def base_of(self, step: str | None) -> BaseStage:
        """What the state after that step grew from."""
        return (self.stages[step].base if step is not None else None) or self.base

    @property
    def base_snapshots(self) -> frozenset[SnapshotId]:
        """Snapshots that it begins with: their memory is not taken."""
        found = [self.base, *(stage.base for stage in self.stages.values() if stage.base is not None)]
        return frozenset(base.snapshot for base in found if base.snapshot is not None)

    def state_key(self, step: str | None) -> StageKey:
        """The key of the state after that step."""
        return self.base.key if step is None else self.stages[step].key


def make_plan(
    source: Source,
    facts: HostFacts,
    base_snapshot: Snapshot | None = None,
    image: ResolvedImage | None = None,
    readings: Readings | None = None,
    release: Digest | None = None,
    others: Mapping[int, FoundBase] | None = None,
) -> Plan:
    """Check the graph, read what is copied, and derive every key. Starts nothing, writes nothing.

    ``base_snapshot`` and ``image`` are what the recipe's base of that kind is today; ``readings`` are shared by
    the plans of one recipe's cells. ``others``: what the bases of steps are, by the step's position.
    """
    machine = machine_of(source, base_snapshot)
    readings = readings or Readings()
    bases = Bases(source, facts, machine, readings)
    base = bases.stage(source.recipe.base, ("base",), FoundBase(base_snapshot, image, release))
    graph = Graph(source)
    planner = _Planner(source, facts, machine, base, readings, bases, others or {})
    stages: dict[str, Stage] = {}
    for step_id in graph.order:
        stages[step_id] = planner.stage(graph, step_id, stages)
    outputs = tuple(planner.output(graph, position, stages) for position in range(len(source.recipe.outputs)))
    return Plan(source, machine, source.recipe.machine.internet, base, stages, outputs)


class _Planner:
    def __init__(
        self,
        source: Source,
        facts: HostFacts,
        machine: MachineSpec,
        base: BaseStage,
        readings: Readings,
        bases: Bases,
        others: Mapping[int, FoundBase],
    ) -> None:
        self._bases = bases
        self._others = others
        self._source = source
        self._readings = readings
        self._facts = facts
        self._machine = machine
        self._base = base

    def stage(self, graph: Graph, step_id: str, done: Mapping[str, Stage]) -> Stage:
        index, step = graph.steps[step_id]
        if step.base is not None:
            base = self._bases.stage(step.base, ("steps", index, "base"), self._others.get(index, FoundBase()))
            waits = graph.waits(step_id, None)
            return Stage(index, step, None, waits, base.inputs, base.context, False, base.depth, None, base)
        parent = graph.parent(step_id)
        before = done[parent] if parent is not None else None
        context = before.context if before else self._base.context
        parent_inputs = before.inputs if before else self._base.inputs
        after = _context_after(context, step)
        files = self._files(index, step)
        memory = step.verb in {"start", "checkpoint"} or bool(before and before.memory)
        depth = (before.depth if before else self._base.depth) + (step.verb in Step.STATES)
        if depth > MAX_DISK_LAYERS:
            raise self._source.error(
                ("steps", index),
                f"this step would be disk layer {depth}; a snapshot has at most {MAX_DISK_LAYERS}",
                fix="join steps, or publish an output and build on it",
            )
        if step.secrets and memory and step.verb != "verify":
            raise self._source.document.error(
                ("steps", index, "secrets"),
                "this step's state has memory, which could keep a secret",
                fix="move the step before the one with 'start'",
                key=True,
            )
        if step.verb in {"env", "workdir", "user"}:
            stage_inputs = parent_inputs
        else:
            stage_inputs = self._inputs(step, parent_inputs.key, context, files, done)
        waits = graph.waits(step_id, parent)
        below = before.base if before else None
        return Stage(index, step, parent, waits, stage_inputs, after, memory, depth, files, below)

    def _files(self, index: int, step: Step) -> CopiedFiles | None:
        """What a step takes of the recipe's folder."""
        where: Where
        if step.pip is not None and step.pip.requirements is not None:
            path, where = step.pip.requirements, ("steps", index, "pip", "requirements")
            found = self._examined(where, path, lambda folder: None)
            self._require_alone(where, found)
            return found
        if step.copy_ is None or isinstance(step.copy_.from_, FromStep):
            return None
        where = ("steps", index, "copy", "from")
        rules = step.copy_.ignore

        def ignore(copied: Path) -> Ignore | None:
            folder = self._source.folder_at(where)
            return Ignore.beside(folder, copied) if rules is None else Ignore.named(folder / rules, copied)

        if isinstance(step.copy_.from_, str):
            found = self._examined(where, step.copy_.from_, ignore)
            if step.copy_.unpack and found.is_directory:
                raise self._source.error(where, "a directory is no archive", fix="leave out 'unpack'")
            return found
        paths = list(enumerate(step.copy_.from_))
        parts = [
            (posixpath.basename(path.rstrip("/")), self._examined((*where, number), path, ignore))
            for number, path in paths
        ]
        return CopiedFiles.of_parts(self._source.folder_at(where), parts)

    def _require_alone(self, where: Where, file: CopiedFiles) -> None:
        try:
            require_alone(file.root)
        except AenvError as error:
            raise self._source.error(where, error.message, fix=error.fix) from error

    def _examined(self, where: Where, path: str, ignore: Callable[[Path], Ignore | None]) -> CopiedFiles:
        if not path:
            raise self._source.error(where, f"{self._source.recipe.steps[int(where[1])].verb}: a path is empty")
        folder = self._source.folder_at(where)
        try:
            return self._readings.examine(folder / path, ignore(folder / path))
        except FileNotFoundError:
            raise self._source.error(
                where,
                f"no such file or directory: {path}",
                fix=f"the path is relative to the recipe's folder, {folder}",
            ) from None
        except OSError as error:
            raise self._source.error(where, f"cannot read {error.filename}: {error.strerror}") from error
        except AenvError as error:
            raise self._source.error(where, error.message, fix=error.fix) from error

    def _inputs(
        self,
        step: Step,
        parent: StageKey,
        context: Context,
        files: CopiedFiles | None,
        done: Mapping[str, Stage],
    ) -> Inputs:
        common: dict[str, object] = {"parent": parent, "architecture": self._facts.architecture}
        common["envd"] = self._facts.envd_digest
        if step.salt is not None:  # without one, the key is that of before there were any
            common["salt"] = step.salt
        if step.copy_ is not None:
            values = fields(step.copy_)
            if not step.copy_.unpack:
                del values["unpack"]
            if step.copy_.mode is None:  # the key is that of before there was any
                del values["mode"]
            values["to"] = copied_to(step.copy_, context, files)
            values["user"] = step.copy_.user or context.user
            values["from"] = files.digest if files else None
            if isinstance(step.copy_.from_, FromStep):
                values["from"] = [done[step.copy_.from_.step].key, step.copy_.from_.path]
            return inputs("stage/copy", 1, **common, **values)
        bound = {"machine": self._machine, "memory_facts": self._facts.memory}
        if step.checkpoint is not None:
            return inputs("stage/checkpoint", 1, **common, **bound)
        if step.mkdir is not None:
            wanted = {"path": copy_target(step.mkdir.path, context), "user": step.mkdir.user or context.user}
            return inputs("stage/mkdir", 1, **common, **wanted)
        if step.write is not None:
            return inputs("stage/write", 1, **common, files=_written(step, context))
        common["internet"] = self._source.recipe.machine.internet
        if step.secrets:  # their names; without, the key is that of before there were any
            common["secrets"] = sorted(set(step.secrets))
        if (package_inputs := _of_fetched(step, context, files)) is not None:
            return inputs(f"stage/{step.verb}", 1, **common, **package_inputs)
        if step.verify is not None:
            return inputs("stage/verify", 1, **common, **_effective(step.verify, context))
        command = step.run or step.start
        assert command is not None
        values = _effective(command, context)
        if step.start is None:
            return inputs("stage/run", 1, **common, **values)
        ready = fields(step.ready) if step.ready else None
        if ready is not None and ready["url"] is None:  # the key is that of before there was any
            del ready["url"]
        return inputs("stage/start", 1, **common, **values, **bound, ready=ready)

    def output(self, graph: Graph, position: int, stages: Mapping[str, Stage]) -> PlannedOutput:
        output = self._source.recipe.outputs[position]
        where: Where = ("outputs", position, "from")
        state = output.from_
        if state is None:
            states = [step.id for step in self._source.recipe.steps if step.verb != "verify"]
            state = states[-1] if states else None
        else:
            graph.check(state, where)
            if graph.steps[state][1].verb == "verify":
                raise self._source.error(where, f"the step {state!r} is a verify, which keeps no state")
        stage = stages[state] if state is not None else None
        memory = bool(stage and stage.memory) if output.memory is None else output.memory
        root = (stage.base if stage else None) or self._base
        context = stage.context if stage else self._base.context
        hooks = output.hooks()
        if hooks is not None and not memory:
            kind = hooks.listed()[0][0]
            message = f"{kind!r} is for guests restored from memory, and this output has none"
            raise self._source.document.error(
                ("outputs", position, kind), message, fix="say 'memory: true' in the output", key=True
            )
        bound = self._facts.memory if memory else None
        labels = {**root.labels, **output.labels}
        output_inputs = inputs(
            "output",
            1,
            state=stage.key if stage else self._base.key,
            context=context,
            machine=self._machine,
            memory=memory,
            memory_facts=bound,
            envd=self._facts.envd_digest if memory else None,
            labels=labels,
            **({"hooks": hooks} if hooks else {}),  # without, the key is that of before there were any
        )
        name = output.name or self._source.recipe.name
        return PlannedOutput(output, name, state, output_inputs, context, memory, hooks, labels)


def copy_target(to: str, context: Context) -> str:
    """The absolute target; a trailing slash (put it inside) is kept."""
    path = posixpath.normpath(posixpath.join(context.workdir, to))
    return path.rstrip("/") + "/" if to.endswith("/") else path


def copied_to(copy: Copy, context: Context, files: CopiedFiles | None) -> str:
    """Where a copy goes: of a file of the host the whole path, its name included."""
    target = copy_target(copy.to, context)
    if copy.unpack:
        return target
    inside = isinstance(copy.from_, str) and files is not None and not files.is_directory and target.endswith("/")
    return target + posixpath.basename(str(copy.from_).rstrip("/")) if inside else target


def _written(step: Step, context: Context) -> list[dict[str, object]]:
    """Each file with what counts of it: where, whose, its mode and its content."""
    return [
        {
            "to": copy_target(file.to, context),
            "content": file.content,
            "mode": file.mode_bits,
            "user": file.user or context.user,
        }
        for file in step.files_written
    ]


def _of_fetched(step: Step, context: Context, files: CopiedFiles | None) -> dict[str, object] | None:
    """What counts of apt, pip and git; None of another verb."""
    if step.apt is not None:
        return {**fields(step.apt), "packages": sorted(set(step.apt.packages)), "env": context.env}
    if step.pip is not None:
        values = {**fields(step.pip), "packages": sorted(set(step.pip.packages))}
        return {
            **values,
            "requirements": files.digest if files else None,
            "env": context.env,
            "user": context.user,
        }
    if step.git is not None:
        values = {**fields(step.git), "to": copy_target(step.git.to, context).rstrip("/") or "/"}
        return {**values, "env": context.env, "user": context.user}
    return None


def run_context(command: Run | Verify, context: Context) -> Context:
    """How the command runs: its own words over the context's."""
    return Context(
        env={**context.env, **command.env},
        workdir=command.workdir or context.workdir,
        user=command.user or context.user,
    )


def user_of(step: Step, context: Context) -> str:
    """Who runs the command of a step."""
    if step.apt is not None:
        return "root"
    command = step.run or step.verify or step.start
    return run_context(command, context).user if command is not None else context.user


def argv(words: str | tuple[str, ...], shell: str) -> tuple[str, ...]:
    """Text for the shell, a list as it is."""
    return (shell, "-ec", words) if isinstance(words, str) else words


def _effective(command: Run | Verify, context: Context) -> dict[str, object]:
    effective = run_context(command, context)
    words = command.command if isinstance(command, Run) else command.run
    values = fields(command)
    values.pop("shell")
    values.pop("command", None)
    values["run"] = argv(words, command.shell)
    return {**values, "env": effective.env, "workdir": effective.workdir, "user": effective.user}


def _context_after(context: Context, step: Step) -> Context:
    """The one that later steps have; ``InvalidInput`` for one that no process can have: a path too long, say."""
    try:
        return Context.model_validate(_changed(context, step).model_dump())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(f"after step {step.id!r} the context is not valid: {where}: {first['msg']}") from None


def _changed(context: Context, step: Step) -> Context:
    if step.env is not None and step.expand:
        found = {name: expand(value, context.env.get) for name, value in step.env.items()}
        return context.model_copy(update={"env": {**context.env, **found}})
    if step.env is not None:
        return context.model_copy(update={"env": {**context.env, **step.env}})
    if step.workdir is not None:
        return context.model_copy(
            update={"workdir": posixpath.normpath(posixpath.join(context.workdir, step.workdir))}
        )
    return context.model_copy(update={"user": step.user}) if step.user is not None else context


def machine_of(source: Source, base: Snapshot | None) -> MachineSpec:
    """The recipe's machine, filled up from the base snapshot's or the defaults."""
    wanted = source.recipe.machine
    default = base.machine if base else DEFAULT_MACHINE
    if base and wanted.disk is not None and wanted.disk != base.machine.disk_mib:
        raise Unsupported(
            f"{source.document.mark(('machine', 'disk'))}: the base snapshot's disk has "
            f"{base.machine.disk_mib} MiB; a disk cannot change its size",
            fix="leave out 'disk', or build the base with the size you need",
        )
    return MachineSpec(
        cpus=wanted.cpus or default.cpus,
        memory_mib=wanted.memory or default.memory_mib,
        disk_mib=wanted.disk or default.disk_mib,
    )
