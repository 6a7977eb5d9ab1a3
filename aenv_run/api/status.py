"""GET /health and /metrics: for load balancers and Prometheus, without the API key."""

from __future__ import annotations

from fastapi import APIRouter, Response

from aenv_run.api.errors import documented
from aenv_run.api.metrics import CONTENT_TYPE
from aenv_run.api.server import Serving

router = APIRouter(tags=["status"])


@router.head("/health", status_code=204, include_in_schema=False)
@router.get("/health", status_code=204)
async def health() -> None:
    """The server serves."""


@router.get(
    "/metrics",
    responses={**documented(), 200: {"content": {"text/plain": {}}, "description": "Prometheus's text"}},
    response_class=Response,
)
async def metrics(serving: Serving) -> Response:
    """For Prometheus."""
    return Response(await serving.metrics.text(), media_type=CONTENT_TYPE)
