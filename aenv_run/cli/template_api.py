"""The template endpoints for commands: of the server that is chosen, or of this home, in this very process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from aenv_run.cli.arguments import server as chosen_server
from aenv_run.errors import (
    AenvError,
    Conflict,
    InvalidInput,
    LimitReached,
    NodeUnavailable,
    NotFound,
    Unauthenticated,
    Unsupported,
)

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 120.0
_KINDS: Mapping[int, type[AenvError]] = {
    400: InvalidInput, 401: Unauthenticated, 404: NotFound, 409: Conflict, 429: LimitReached, 501: Unsupported,
}  # fmt: skip


class TemplateApi:
    """Calls, whose answers are JSON; every error is one of ours. ``remote``: builds go on without this process."""

    def __init__(self, http: httpx.AsyncClient, *, remote: bool) -> None:
        self._http, self.remote = http, remote

    async def call(self, method: str, path: str, body: object = None, **query: str | int) -> object:
        """One call; None where the answer is empty."""
        import httpx

        try:
            answer = await self._http.request(method, path, json=body, params=query)
        except httpx.HTTPError as error:
            raise NodeUnavailable(
                f"the server does not answer: {error}", fix="is `aenv serve` running?"
            ) from error
        if answer.status_code >= 300:
            raise _error(answer)
        found: object = answer.json() if answer.content else None
        return found

    async def one(self, method: str, path: str, body: object = None, **query: str | int) -> dict[str, object]:
        """A call that is answered with an object."""
        found = await self.call(method, path, body, **query)
        assert isinstance(found, dict)
        return found

    async def resolve(self, name: str) -> str:
        """The template's id, by its name; ``NotFound``."""
        return str((await self.one("GET", f"/templates/aliases/{quote(name, safe='')}"))["templateID"])

    async def status(self, template: str, build_id: str, offset: int) -> dict[str, object]:
        """How far a build is, with its log from there on."""
        path = f"/templates/{quote(template, safe='')}/builds/{build_id}/status"
        return await self.one("GET", path, logsOffset=offset)


def _error(answer: httpx.Response) -> AenvError:
    try:
        message = str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered with {answer.status_code}"
    return _KINDS.get(answer.status_code, AenvError)(message)


@asynccontextmanager
async def template_api() -> AsyncIterator[TemplateApi]:
    """Builds that were begun in this process end with it."""
    import httpx

    address = chosen_server()
    if address is not None:
        key = {"X-API-Key": address.api_key}
        async with httpx.AsyncClient(base_url=address.url, headers=key, timeout=TIMEOUT_S) as http:
            yield TemplateApi(http, remote=True)
        return
    from aenv_run.api.app import make_app
    from aenv_run.api.server import open_server
    from aenv_run.api.settings import Settings

    settings = Settings.read()
    server = open_server(settings)
    transport = httpx.ASGITransport(make_app(settings, server))
    key = {"X-API-Key": server.keys.api_key}
    async with httpx.AsyncClient(transport=transport, base_url="http://aenv", headers=key, timeout=None) as http:
        try:
            yield TemplateApi(http, remote=False)
        finally:
            await server.builds.close()
