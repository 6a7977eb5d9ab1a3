"""Pages of the catalog: every version, and the lineage of a name as a picture."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from aenv_run.api.ui.lineage import BOX_HEIGHT, BOX_WIDTH, picture
from aenv_run.api.ui.page import Pages
from aenv_run.api.ui.views import catalog_row
from aenv_run.catalog.graph import graph
from aenv_run.errors import TooLarge

MAX_BOXES = 500


def routes(pages: Pages) -> list[BaseRoute]:
    """Those below ``/ui``."""
    own = _Catalog(pages)
    return [Route("/catalog", own.list), Route("/catalog/{name:path}", own.lineage)]


class _Catalog:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def list(self, request: Request) -> Response:
        """The newest version of each name first."""
        catalog = await self._pages.server.catalog()
        entries = await asyncio.to_thread(catalog.entries)
        rows = [
            catalog_row(entry) for entry in sorted(entries, key=lambda entry: (entry.name, -(entry.version or 0)))
        ]
        return self._pages.page(request, "catalog.html", entries=rows)

    async def lineage(self, request: Request) -> Response:
        """How the versions of a name grew."""
        name = request.path_params["name"]
        catalog = await self._pages.server.catalog()
        try:
            found = await asyncio.to_thread(graph, catalog, name, max_nodes=MAX_BOXES)
        except TooLarge as error:
            return self._pages.page(request, "lineage.html", name=name, problem=error.message, picture=None)
        drawn = picture(found)
        sizes = {"box_width": BOX_WIDTH, "box_height": BOX_HEIGHT}
        return self._pages.page(request, "lineage.html", name=name, problem="", picture=drawn, **sizes)
