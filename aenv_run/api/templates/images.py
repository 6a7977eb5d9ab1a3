"""What a build begins with: images by the names that SDKs use, and templates."""

from __future__ import annotations

import asyncio
import re

from aenv_run.api.references import catalog_reference
from aenv_run.api.server import Server
from aenv_run.api.templates.running import Login
from aenv_run.api.templates.steps import READY_LABEL, START_LABEL, From
from aenv_run.api.wire.templates import BuildAsked, RegistryLogin
from aenv_run.catalog import Catalog, Resolved
from aenv_run.errors import InvalidInput, NotFound

_IMAGE = re.compile(
    r"(?=.{1,512}$)[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]+(?=/))?(/[a-z0-9][a-z0-9._-]*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)


async def begin_of(server: Server, asked: BuildAsked) -> From:
    """The base of the recipe. ``InvalidInput`` for an image or a template that cannot be."""
    if asked.from_template is not None:
        return await _of_template(server, asked.from_template)
    return From(base_of_image(server, asked.from_image or server.settings.default_image))


def base_of_image(server: Server, image: str) -> dict[str, object]:
    """A base as a recipe writes it. Callers name images of registries; the settings may say what one is."""
    name = image.removeprefix("docker://")
    meant = server.settings.images.get(image, server.settings.images.get(name))
    if meant is not None:
        for kind in ("snapshot", "archive"):
            if meant.startswith(f"{kind}:"):
                return {kind: meant.removeprefix(f"{kind}:")}
        return {"image": meant if re.match(r"(docker|oci|docker-archive):", meant) else f"docker://{meant}"}
    if not _IMAGE.fullmatch(name):
        raise InvalidInput(f"{image[:200]!r} is not an image of a registry", fix="write HOST/NAME:TAG")
    allowed = server.settings.registries
    if allowed and (host := _host(name)) not in allowed:
        raise InvalidInput(
            f"images of {host[:80]} are not taken here",
            fix=f"use one of {', '.join(allowed)}, or add it to the server's setting 'registries'",
        )
    return {"image": f"docker://{name}"}


def login_of(asked: BuildAsked, server: Server) -> Login | None:
    """The credentials for the image's registry. ``InvalidInput`` for those of a kind that is not supported."""
    given = asked.from_image_registry
    if given is None:
        return None
    others = (given.aws_access_key_id, given.aws_secret_access_key, given.aws_region, given.service_account_json)
    if given.type == "registry" and any(other is not None for other in others):
        raise InvalidInput("fromImageRegistry: the type 'registry' has a username and a password, and no more")
    if given.type != "registry":
        raise InvalidInput(
            f"fromImageRegistry: the type {given.type!r} is not supported here",
            fix="log the server's user in at that registry, or send a user and a password (type 'registry')",
        )
    return Login(_host(asked.from_image or server.settings.default_image), *_pair(given))


def _pair(given: RegistryLogin) -> tuple[str, str]:
    if not given.username or given.password is None:
        raise InvalidInput("fromImageRegistry: username and password are needed")
    if ":" in given.username:  # the pair is sent as user:password (RFC 7617)
        raise InvalidInput("fromImageRegistry: a username has no ':'")
    return given.username, given.password


def _host(image: str) -> str:
    first, slash, _ = image.removeprefix("docker://").partition("/")
    return first if slash and (re.search(r"[.:]", first) or first == "localhost") else "docker.io"


async def _of_template(server: Server, written: str) -> From:
    catalog = await server.catalog()
    try:
        text = catalog_reference(written).text
        found = await asyncio.to_thread(_resolve, catalog, text, server.settings.templates.get(text))
        snapshot = await asyncio.to_thread(catalog.repository.snapshot, found.snapshot_id)
    except NotFound as error:
        raise InvalidInput(f"fromTemplate: template {written[:80]!r} not found: {error.message}") from error
    labels = snapshot.labels
    return From({"snapshot": str(found.snapshot_id)}, labels.get(START_LABEL), labels.get(READY_LABEL))


def _resolve(catalog: Catalog, text: str, otherwise: str | None) -> Resolved:
    """Blocking: what the catalog calls so, or else what the settings say that it means."""
    try:
        return catalog.resolve(text)
    except NotFound:
        if otherwise is None:
            raise
        return catalog.resolve(catalog_reference(otherwise).text)
