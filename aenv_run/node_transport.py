"""How calls reach a node: what every way there promises, and how answers are read."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from aenv_run.errors import AenvError, NodeUnavailable, ProtocolError
from aenv_run.node_wire import ErrorBody, Health

M = TypeVar("M", bound=BaseModel)

#: Pausing or committing gigabytes takes as long as the disk needs.
CALL_TIMEOUT_S = 3600.0
JSON_BODY = {"Content-Type": "application/json"}


class NodeTransport(Protocol):
    """One way to a node. Errors are ours, as the node sent them; ``NodeUnavailable`` when it cannot be reached."""

    async def health(self) -> Health | None:
        """How the node is; None when there is none. Never starts one."""

    async def request(self, method: str, path: str, content: str | None) -> bytes:
        """The body of the answer. What only reads may be asked twice, anything else only if nothing was sent."""

    def lines(self, path: str, content: str) -> AsyncGenerator[bytes, None]:
        """POST it and read the answer line by line; the node is told when it is closed before its end."""


def parse(model: type[M], data: bytes) -> M:
    """An answer as its model; ``ProtocolError``."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(f"the node sent a malformed {model.__name__}: {error.error_count()} errors") from error


def error_of(response: httpx.Response) -> AenvError:
    """The error that an answer carries."""
    try:
        return ErrorBody.model_validate_json(response.content).error()
    except ValidationError:
        return NodeUnavailable(f"the node answered {response.status_code}: {response.text[:200]}")
