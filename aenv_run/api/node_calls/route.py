"""What all of these calls have in common: the same version on both sides, and errors that keep their type."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from aenv_run.errors import AenvError, Interrupted, InvalidInput, TooLarge
from aenv_run.node_wire import ErrorBody, known
from aenv_run.server_link import VERSION_HEADER, compatible, other_version
from aenv_run.version import VERSION
from aenv_run.whole import whole

Handler = Callable[[Request], Awaitable[Response]]


class CallRoute(APIRoute):
    """A route that answers clients of its own version only."""

    def get_route_handler(self) -> Handler:  # type: ignore[override]  # an Awaitable is what is awaited
        """The route's, with what stands around it."""
        handle = super().get_route_handler()

        async def call(request: Request) -> Response:
            try:
                theirs = request.headers.get(VERSION_HEADER, "")
                if not compatible(theirs):
                    raise other_version("this client", theirs)
                response = await handle(request)
            except (AenvError, OSError) as error:
                return answer(known(error, where="the server's log"))
            except ClientDisconnect:
                return answer(Interrupted("the caller went away"))
            except RequestValidationError as error:
                parts = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()[:5]]
                return answer(InvalidInput("; ".join(parts)))
            except HTTPException as error:
                return answer(TooLarge(error.detail) if error.status_code == 413 else InvalidInput(error.detail))
            response.headers[VERSION_HEADER] = VERSION
            return response

        return call


def answer(error: AenvError) -> Response:
    """The error as clients of ours read it, with all its parts."""
    body = ErrorBody.of(error)
    return JSONResponse(
        {"code": error.http_status, "error_code": body.code, "message": body.message, "fix": body.fix},
        status_code=error.http_status,
        headers={VERSION_HEADER: VERSION},
    )


async def body_of(request: Request, limit_bytes: int) -> bytes:
    """The whole body; ``TooLarge`` as soon as there is more."""
    return await whole(request.stream(), limit_bytes, TooLarge(f"the body is larger than {limit_bytes} bytes"))
