"""Templates by their names: list, one, delete, aliases, tags."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from aenv_run.api.errors import documented, refuse
from aenv_run.api.paging import MAX_PAGE, NEXT_TOKEN, page
from aenv_run.api.references import catalog_reference
from aenv_run.api.sandboxes.snapshots import delete_snapshot
from aenv_run.api.server import Server, Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.templates.catalog import Known, Templates
from aenv_run.api.wire.templates import (
    AliasReply,
    AssignedTags,
    TagRow,
    TagsAsked,
    Template,
    TemplateBuild,
    TemplateWithBuilds,
    UntagAsked,
    VisibilityAsked,
)
from aenv_run.catalog import Catalog
from aenv_run.errors import InvalidInput, NotFound
from aenv_run.types import Name, Tag

router = APIRouter(tags=["templates"], route_class=StrictRoute)
NamePath = Annotated[str, Path(max_length=512, description="a template's name")]
Limit = Annotated[int | None, Query(ge=1, le=MAX_PAGE, description="without it: all")]
Token = Annotated[str | None, Query(alias="nextToken", max_length=1024)]


async def _templates(server: Server) -> Templates:
    return Templates(await server.catalog(), server.builds.records)


async def _listed(server: Server) -> list[Template]:
    templates = await _templates(server)
    return await asyncio.to_thread(lambda: [templates.row(known) for known in templates.all()])


@router.get("/templates", responses=documented())
async def list_templates(
    serving: Serving, team_id: Annotated[str | None, Query(alias="teamID", max_length=256)] = None
) -> list[Template]:
    """All, by name."""
    return await _listed(serving)


@router.get("/v2/templates", responses=documented())
async def list_paged(
    serving: Serving,
    response: Response,
    team_id: Annotated[str | None, Query(alias="teamID", max_length=256)] = None,
    limit: Limit = None,
    next_token: Token = None,
) -> list[Template]:
    """All, newest first; ``x-next-token`` leads to the next page."""
    rows, following = page(
        await _listed(serving), lambda row: (row.created_at.timestamp(), row.template_id), token=next_token,
        limit=limit, oldest_first=False,
    )  # fmt: skip
    if following is not None:
        response.headers[NEXT_TOKEN] = following
    return rows


@router.get("/templates/aliases/{alias:path}", responses=documented(403, 404))
async def find_alias(alias: NamePath, serving: Serving) -> AliasReply:
    """Which template is called so."""
    templates = await _templates(serving)
    known = await asyncio.to_thread(templates.find, alias)
    return AliasReply(template_id=str(known.name))


@router.post("/templates/tags", status_code=201, responses=documented(404, 409))
async def assign_tags(body: TagsAsked, serving: Serving) -> AssignedTags:
    """Move tags to what ``target`` means now."""
    templates = await _templates(serving)
    tags = _tags(body.tags)

    def assign() -> str:
        known = templates.find(body.target)
        found = templates.catalog.resolve(catalog_reference(body.target).text)
        assert found.version is not None
        for tag in tags:
            templates.catalog.tag(known.name, tag, found.version)
        return templates.build_id(known, found.version)

    build_id = await asyncio.to_thread(assign)
    return AssignedTags(tags=tags, build_id=build_id)


@router.delete("/templates/tags", status_code=204, responses=documented(404))
async def remove_tags(body: UntagAsked, serving: Serving) -> None:
    """The versions stay."""
    templates = await _templates(serving)
    tags = _tags(body.tags)

    def remove() -> None:
        known = templates.find(body.name)
        there = templates.catalog.tags(known.name)
        if missing := [tag for tag in tags if tag not in there]:
            raise NotFound(f"template {known.name} has no tag {missing[0]!r}")
        for tag in tags:
            templates.catalog.untag(known.name, tag)

    await asyncio.to_thread(remove)


def _tags(written: tuple[str, ...]) -> tuple[Tag, ...]:
    try:
        return tuple(dict.fromkeys(Tag(tag) for tag in written))
    except InvalidInput as error:
        raise InvalidInput(error.message, fix="a tag begins with a letter or '_', as v1.2 does") from None


@router.get("/templates/{template_id:path}/tags", responses=documented(403, 404))
async def list_tags(template_id: NamePath, serving: Serving) -> list[TagRow]:
    """Each, and the build that it is at."""
    templates = await _templates(serving)
    rows = await asyncio.to_thread(lambda: templates.tags(templates.find(template_id)))
    return [TagRow(tag=tag, build_id=build_id, created_at=since) for tag, build_id, since in rows]


@router.get("/templates/{template_id:path}", responses=documented(404))
async def get(
    template_id: NamePath, serving: Serving, response: Response, limit: Limit = None, next_token: Token = None
) -> TemplateWithBuilds:
    """One, with a page of its builds."""
    templates = await _templates(serving)

    def read() -> tuple[Known, list[TemplateBuild]]:
        known = templates.find(template_id)
        return known, templates.builds(known)

    known, builds = await asyncio.to_thread(read)
    rows, following = page(
        builds, lambda build: (build.created_at.timestamp(), build.build_id), token=next_token, limit=limit,
        oldest_first=False,
    )  # fmt: skip
    if following is not None:
        response.headers[NEXT_TOKEN] = following
    return await asyncio.to_thread(templates.detail, known, rows)


@router.patch("/templates/{template_id:path}", responses=documented(404, 501))
@router.patch("/v2/templates/{template_id:path}", responses=documented(404, 501))
async def set_visibility(template_id: NamePath, body: VisibilityAsked, serving: Serving) -> dict[str, list[str]]:
    """There is one team here, which sees all: no template is public."""
    templates = await _templates(serving)
    known = await asyncio.to_thread(templates.find, template_id)
    if body.public:
        raise refuse(501, "public templates are not supported", error_code="unsupported")
    return {"names": [str(known.name)]}


@router.delete("/templates/{template_id:path}", status_code=204, responses=documented(404, 409))
async def delete(template_id: NamePath, serving: Serving) -> None:
    """All versions and builds of a name, or a snapshot. Sandboxes of it run on."""
    if await delete_snapshot(serving, template_id):
        return
    templates = await _templates(serving)
    known = await asyncio.to_thread(templates.find, template_id)
    if ":" in template_id:
        raise InvalidInput(
            "a template is deleted with all of its versions", fix="name it without a tag, or remove the tag"
        )
    for build in known.builds:
        serving.builds.require_ours(build)
    for build in known.builds:
        await serving.builds.cancel(build.build_id)
    await asyncio.to_thread(_remove, templates.catalog, known.name)
    await asyncio.to_thread(serving.builds.records.remove_of, known.name)


def _remove(catalog: Catalog, name: Name) -> None:
    if catalog.versions(name):
        catalog.remove(name)
