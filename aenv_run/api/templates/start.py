"""From a request to a running build: checked at once, prepared and built in its turn."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aenv_run import durable
from aenv_run.api.errors import refuse
from aenv_run.api.references import catalog_reference
from aenv_run.api.server import Server
from aenv_run.api.templates.archives import Packed, repack
from aenv_run.api.templates.files import Archives
from aenv_run.api.templates.images import begin_of, login_of
from aenv_run.api.templates.records import Build
from aenv_run.api.templates.running import RECIPE, Prepared, StepRefused
from aenv_run.api.templates.steps import From, RecipeWriter, needs_archive
from aenv_run.api.wire.templates import BuildAsked
from aenv_run.catalog import require_publishable
from aenv_run.errors import AenvError, InvalidInput, NotFound, from_os
from aenv_run.process import read_start_ticks
from aenv_run.types import Name, Tag
from aenv_run.untar import Limit

DEFAULT_TAG = "latest"
MAX_WAITING = 200


def named(written: str) -> tuple[Name, Tag | None]:
    """``name`` or ``name:tag`` of a template to be made; ``InvalidInput`` if nothing can be called so."""
    try:
        reference = catalog_reference(written)
        if reference.alias is None:
            raise InvalidInput("an id is no name of a template")
        _, _, tag = reference.text.partition(":")
        name = Name(reference.alias)
        require_publishable(name)
        return name, Tag(tag) if tag else None
    except NotFound:
        raise InvalidInput(
            f"{written[:80]!r} is no name of a template",
            fix="write lower-case letters, digits, '.', '_' or '-', and a tag that begins with a letter",
        ) from None


async def new_build(
    server: Server,
    written: str,
    tags: tuple[str, ...] = (),
    *,
    cpus: int | None = None,
    memory_mib: int | None = None,
    min_free_disk_mib: int | None = None,
) -> Build:
    """A build of that template, which waits for its steps."""
    name, tag = named(written)
    wanted = dict.fromkeys([*([tag] if tag else []), *map(Tag, tags)]) or {Tag(DEFAULT_TAG): None}
    settings = server.settings
    return await asyncio.to_thread(
        server.builds.records.new,
        name,
        tuple(wanted),
        cpus=cpus or settings.template_cpus,
        memory_mib=memory_mib or settings.template_memory_mib,
        disk_mib=settings.template_disk_mib + (min_free_disk_mib or 0),
    )


@dataclass(frozen=True)
class _Job:
    """All that a build needs to write its recipe."""

    build: Build
    asked: BuildAsked
    begin: From
    folder: Path
    internet: bool
    memory: bool

    def check(self) -> None:
        """What can be said before anything is unpacked."""
        packed = {number: Packed(Path("/"), is_file=True) for number in self._copies()}
        self._writer(packed).recipe(self.asked)

    def hold(self, archives: Archives) -> None:
        """Keep the archives for this build, whatever becomes of the others. Blocking."""
        context = self.folder / "context"
        context.mkdir(mode=0o700, exist_ok=True)
        for number in self._copies():
            hash = (self.asked.steps or ())[number - 1].files_hash
            if hash is None:
                raise InvalidInput(f"step {number}: COPY needs the filesHash of its archive")
            try:
                os.link(archives.path(hash), context / f"{number}.archive")
            except FileNotFoundError:
                raise InvalidInput(
                    f"step {number}: the archive {hash} is not here",
                    fix="upload it: GET …/files/{hash} says where",
                ) from None
            except OSError as error:
                raise from_os(error, f"step {number}: its archive cannot be kept for the build") from error

    def prepare(self) -> Prepared:
        """Unpack, and write the recipe. Blocking."""
        packed: dict[int, Packed] = {}
        fix = "copy less, or ask for a larger disk"
        limit = Limit(self.build.disk_mib << 20, "fits on the template's disk", fix=fix)  # all copies together
        for number in self._copies():
            archive = self.folder / "context" / f"{number}.archive"
            source = (*(self.asked.steps or ())[number - 1].args, "")[0]
            try:
                packed[number] = repack(archive, source, self.folder / "context" / str(number), limit)
            except AenvError as error:
                raise StepRefused(str(number), error.message) from error
            archive.unlink()
        writer = self._writer(packed)
        durable.replace(self.folder / RECIPE, writer.recipe(self.asked).encode())
        return Prepared(writer.shown, tuple(writer.notes))

    def _copies(self) -> list[int]:
        return [number for number, step in enumerate(self.asked.steps or (), start=1) if needs_archive(step)]

    def _writer(self, packed: Mapping[int, Packed]) -> RecipeWriter:
        return RecipeWriter(self.build, self.begin, packed, self.internet, self.memory)


async def start_build(server: Server, build: Build, asked: BuildAsked) -> None:
    """Begin it, or let it wait; what is wrong with the request is told at once."""
    builds, settings = server.builds, server.settings
    begin, login = await begin_of(server, asked), login_of(asked, server)
    job = _Job(
        build, asked, begin, builds.records.folder(build.build_id), settings.template_internet,
        settings.template_memory_snapshot,
    )  # fmt: skip
    job.check()
    async with builds.starting:
        now = await asyncio.to_thread(builds.records.read, build.build_id)
        if now.started:
            raise InvalidInput(f"build {build.build_id} was started before")
        if builds.running >= MAX_WAITING:
            raise refuse(429, "too many builds wait", error_code="limit_reached", headers={"Retry-After": "10"})
        owner = {"owner_pid": os.getpid(), "owner_ticks": read_start_ticks(os.getpid())}
        try:
            await asyncio.to_thread(job.hold, server.archives)
            started = await asyncio.to_thread(builds.records.change, build.build_id, started=True, **owner)
        except BaseException:  # it was not started, and may be asked for again
            await asyncio.to_thread(shutil.rmtree, job.folder / "context", True)
            raise
        builds.begin(started, job.prepare, fresh=bool(asked.force), login=login)


async def build_image(
    server: Server,
    image: str,
    name: str,
    *,
    cpus: int | None = None,
    memory_mib: int | None = None,
    min_free_disk_mib: int | None = None,
    start_cmd: str | None = None,
    ready_cmd: str | None = None,
) -> Build:
    """A template of an image and nothing else, begun; ``wait`` says how it ended."""
    asked = BuildAsked.model_validate({"fromImage": image, "startCmd": start_cmd, "readyCmd": ready_cmd})
    build = await new_build(server, name, cpus=cpus, memory_mib=memory_mib, min_free_disk_mib=min_free_disk_mib)
    try:
        await start_build(server, build, asked)
    except Exception:  # nobody else knows its id: it would wait for ever
        await asyncio.to_thread(shutil.rmtree, server.builds.records.folder(build.build_id), True)
        raise
    return build


async def wait(server: Server, build_id: str) -> Build:
    """Until it is over; its state then."""
    await server.builds.join(build_id)
    return await asyncio.to_thread(server.builds.records.read, build_id)
