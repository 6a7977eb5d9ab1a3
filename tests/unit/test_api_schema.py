"""The HTTP API does what ``/openapi.json`` says: schemathesis asks what the description allows, and what not."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi import checks

from aenv_run.api.app import make_app
from tests.unit.api_site import api_site
from tests.unit.node_site import Site
from tests.unit.test_templates_api import BUILDER

#: Of each operation; `make soak` asks more.
EXAMPLES = int(os.environ.get("AENV_SCHEMA_EXAMPLES", "1"))
CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
LIMITS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@contextmanager
def listening(site: Site) -> Iterator[tuple[str, str]]:
    """A server on a port of loopback, in a thread of its own: its URL and its key."""
    ready, stop = threading.Event(), asyncio.Event()
    found: list[tuple[str, str, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with api_site(site) as api:
            api.server.builds.builder = BUILDER  # nothing of the network
            app = make_app(api.server.settings, api.server)
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
            task = asyncio.create_task(server._serve())
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            found.append((f"http://127.0.0.1:{port}", api.server.keys.api_key, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()
            server.should_exit = True
            await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield found[0][:2]
    finally:
        found[0][2].call_soon_threadsafe(stop.set)
        thread.join()


def ask_all(operation: APIOperation, url: str, key: str) -> list[int]:
    """Ask all that was made up for it; the statuses. Every second time of a sandbox or template that exists."""
    http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60)
    seen: list[int] = []

    @LIMITS
    @given(case=operation.as_strategy())
    def ask(case: schemathesis.Case) -> None:
        if "sandbox_id" in case.path_parameters and len(seen) % 2 == 0:
            case.path_parameters["sandbox_id"] = _sandbox(http)
        if isinstance(case.body, dict) and "templateID" in case.body and len(seen) % 2 == 0:
            case.body["templateID"] = "tiny"
        response = case.call(base_url=url, headers={"X-API-Key": key})
        seen.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    with http:
        ask()
    return seen


def _sandbox(http: httpx.Client) -> str:
    answer = http.post("/v2/sandboxes", json={"templateID": "tiny", "timeout": 3600})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["sandboxID"])


def test_answers_are_as_described(site: Site) -> None:
    failures = []
    asked: dict[str, list[int]] = {}
    with listening(site) as (url, key):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()
            try:
                asked[operation.label] = ask_all(operation, url, key)
            except Exception as error:  # noqa: BLE001 - all of them are told, and fail the test
                failures.append(f"{operation.label}: {error}")
    assert not failures, "\n\n".join(failures)
    assert {"POST /v2/sandboxes", "GET /v2/sandboxes", "POST /sandboxes/{sandbox_id}/pause"} <= set(asked)
    assert all(asked.values())
