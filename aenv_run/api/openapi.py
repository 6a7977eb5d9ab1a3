"""``/openapi.json``: as FastAPI makes it, without the answers that this server never gives."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi


def describe(app: FastAPI) -> None:
    """Make ``app`` describe itself so; FastAPI says of each route that a wrong body is answered with 422."""
    made: dict[str, object] = {}

    def openapi() -> dict[str, object]:
        if not made:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in schema["paths"].values():
                for operation in path.values():
                    answer = operation["responses"].get("422", {})
                    if "HTTPValidationError" in str(answer):
                        del operation["responses"]["422"]
            for name in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(name, None)
            made.update(schema)
        return made

    app.openapi = openapi  # type: ignore[method-assign]  # what FastAPI's documentation says to do
