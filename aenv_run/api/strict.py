"""A route that ignores nothing in silence: neither a query parameter nor a key of its JSON that comes twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import get_args, get_origin

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from aenv_run.errors import InvalidInput

Handler = Callable[[Request], Awaitable[Response]]


class StrictRoute(APIRoute):
    """What ``APIRouter(route_class=…)`` makes of the functions of the public API."""

    def get_route_handler(self) -> Handler:  # type: ignore[override]  # an Awaitable is what is awaited
        """FastAPI's, behind the checks."""
        handle = super().get_route_handler()
        repeated = _parameters(self.dependant)

        async def call(request: Request) -> Response:
            _check_query(request, repeated)
            return await handle(_StrictRequest(request.scope, request.receive))

        return call


class _StrictRequest(Request):
    async def json(self) -> object:
        """As RFC 8259 has it: no number that is none, and each name once."""
        return json.loads(await self.body(), object_pairs_hook=_once, parse_constant=_no_number)


def _parameters(dependant: Dependant) -> dict[str, bool]:
    """The query parameters of a route and of what it depends on, and whether each may be there more than once."""
    found = {field.alias: _is_list(field.field_info.annotation) for field in dependant.query_params}
    for one in dependant.dependencies:
        found |= _parameters(one)
    return found


def _check_query(request: Request, known: dict[str, bool]) -> None:
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            raise InvalidInput(f"{name[:80]}: this query parameter is not known, and would be ignored")
        if not known[name] and count > 1:
            raise InvalidInput(f"{name}: this query parameter is there more than once")


def _is_list(annotation: object) -> bool:
    return get_origin(annotation) in (list, tuple) or any(_is_list(part) for part in get_args(annotation))


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise json.JSONDecodeError(f"{twice[:80]!r} is there more than once", "", 0)
    return found


def _no_number(word: str) -> object:
    raise json.JSONDecodeError(f"{word} is no number", "", 0)
