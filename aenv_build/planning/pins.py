"""What the moving names of a recipe mean today: images, archives, snapshots, releases and refs of git."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from aenv_build.bases.image import ImageSource
from aenv_build.bases.release import release_digest
from aenv_build.language.document import Where
from aenv_build.language.image_reference import parse_image
from aenv_build.language.load import Source
from aenv_build.language.recipe import Base, Debootstrap
from aenv_build.planning.files import Readings
from aenv_build.planning.lock import Lock, Pin, PinKind
from aenv_run import process
from aenv_run.catalog import Catalog
from aenv_run.errors import AenvError, NotFound, Unsupported
from aenv_run.paths import Home
from aenv_run.repository import Repository

ASK_S = 60.0
#: A transport of git can be a program of the URL's choice; these are none.
GIT_PROTOCOLS = "https:http:ssh:git"


@dataclass(frozen=True)
class Named:
    """A moving name of the recipe, and where it stands."""

    kind: PinKind
    name: str
    where: Where


def named_by(source: Source) -> list[Named]:
    """All moving names of a cell. ``Unsupported`` for one that cannot be pinned."""
    found = _named_by_base(source, source.recipe.base, ("base",))
    for index, step in enumerate(source.recipe.steps):
        if step.base is not None:
            found += _named_by_base(source, step.base, ("steps", index, "base"))
    for index, step in enumerate(source.recipe.steps):
        if step.git is not None and step.git.ref is not None:
            where: Where = ("steps", index, "git", "ref")
            if not step.git.is_remote:
                raise Unsupported(
                    f"{source.document.mark(where)}: a repository inside the sandbox cannot be locked",
                    fix="write its commit instead of a ref",
                )
            found.append(Named("git", f"{step.git.url} {step.git.ref}", where))
    return found


def _named_by_base(source: Source, base: Base, at: Where) -> list[Named]:
    found: list[Named] = []
    if base.image is not None and parse_image(base.image).pin is None:
        found.append(Named("image", base.image, (*at, "image")))
    if base.archive is not None:
        found.append(Named("archive", base.archive, (*at, "archive")))
    if base.snapshot is not None:
        found.append(Named("snapshot", base.snapshot, (*at, "snapshot")))
    if base.debootstrap is not None:
        where: Where = (*at, "debootstrap")
        found.append(Named("release", release_name(source, base.debootstrap, where), where))
    return found


def release_name(source: Source, base: Debootstrap, where: Where) -> str:
    """Mirror and suite. Which mirror is mmdebstrap's own, only mmdebstrap knows."""
    if base.mirror is None:
        raise Unsupported(
            f"{source.document.mark(where)}: a release of the default mirror cannot be locked",
            fix="name the mirror: debootstrap: {mirror: …}",
        )
    return f"{base.mirror} {base.suite}"


async def pins_today(sources: Sequence[Source], home: Home, repository: Repository) -> Lock:
    """Ask for all of them; an error is told at the recipe's line."""
    found: dict[tuple[str, str], Pin] = {}
    readings = Readings()
    for source in sources:
        for named in named_by(source):
            if (named.kind, named.name) in found:
                continue
            try:
                pin = await _pin(source, named, home, repository, readings)
            except AenvError as error:
                mark = source.document.mark(named.where)
                raise type(error)(f"{mark}: {error.message}", fix=error.fix) from error
            found[named.kind, named.name] = Pin(kind=named.kind, name=named.name, pin=pin)
    return Lock.of(found.values())


async def _pin(source: Source, named: Named, home: Home, repository: Repository, readings: Readings) -> str:
    match named.kind:
        case "image":
            reference = parse_image(named.name).at(source.folder)
            return await ImageSource(reference, home.cache / "images").digest()
        case "archive":
            path = source.folder / named.name
            if not path.is_file():
                raise NotFound(f"no such file: {named.name}", fix=f"it is relative to {source.folder}")
            return await asyncio.to_thread(readings.digest, path)
        case "snapshot":
            return (await asyncio.to_thread(Catalog(repository).resolve, named.name)).snapshot_id
        case "release":
            return await release_digest(*named.name.rsplit(" ", 1))
        case "git":
            return await _commit(*named.name.rsplit(" ", 1))


async def _commit(url: str, ref: str) -> str:
    """What the remote has under a tag or branch of that name; of an annotated tag the commit."""
    names = (f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}", ref)
    settings = {"GIT_ALLOW_PROTOCOL": GIT_PROTOCOLS, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}
    argv = ["git", "ls-remote", "--quiet", "--", url, *names]
    done = await process.check(
        argv, what=f"asking {url} for {ref}", fix="check the url, the ref and your login", timeout_s=ASK_S,
        env={**os.environ, **settings},
    )  # fmt: skip
    rows = [line.split("\t", 1) for line in done.stdout.decode(errors="replace").splitlines()]
    heads = {row[1]: row[0] for row in rows if len(row) == 2 and re.fullmatch(r"[0-9a-f]{40}", row[0])}
    for name in names:
        if name in heads:
            return heads[name]
    raise NotFound(f"{url} has no branch or tag {ref}", fix="check the name")
