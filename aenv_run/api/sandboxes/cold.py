"""POST /sandboxes-cold: a sandbox of a container image, which becomes a template of its own first."""

from __future__ import annotations

import hashlib
import re

from fastapi import APIRouter, Request, Response

from aenv_run.api.errors import refuse
from aenv_run.api.sandboxes.create import CREATE_ERRORS, Key, launch
from aenv_run.api.server import Server, Serving
from aenv_run.api.strict import StrictRoute
from aenv_run.api.templates.start import build_image, wait
from aenv_run.api.wire.cold import CreateCold
from aenv_run.api.wire.sandboxes import Sandbox
from aenv_run.node_api import while_connected
from aenv_run.types import Name

router = APIRouter(tags=["sandboxes"], route_class=StrictRoute)


def template_name(body: CreateCold) -> str:
    """Of the image and the size, so that the same asked for again is the same template."""
    last = re.sub(r"[@:].*", "", body.image.lower().rstrip("/").rpartition("/")[2])
    slug = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:32] or "image"
    what = f"{body.image} {body.cpu_count} {body.memory_mb} {body.disk_size_mb}"
    return f"image-{slug}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


async def _built(server: Server, body: CreateCold) -> str:
    """What to launch. A caller who hangs up leaves the build running: the next one finds what it made.

    Who asks for the same while it is built waits for the same build.
    """
    extra_mib = (body.disk_size_mb or server.settings.template_disk_mib) - server.settings.template_disk_mib
    if extra_mib < 0:
        raise refuse(
            400,
            f"diskSizeMB: disks of images have {server.settings.template_disk_mib} MiB at least here",
            error_code="unsupported",
        )
    name = template_name(body)
    async with server.builds.sharing:
        build = await server.builds.running_of(Name(name)) or await build_image(
            server,
            body.image,
            name,
            cpus=body.cpu_count,
            memory_mib=body.memory_mb,
            min_free_disk_mib=extra_mib,
        )
    done = await wait(server, build.build_id)
    if done.status != "ready" or done.snapshot_id is None:
        why = done.reason or "its build did not end"
        raise refuse(400, f"image {body.image[:120]!r} could not be had: {why}", error_code="base_unavailable")
    return f"{done.template}:{done.version}" if done.version is not None else done.snapshot_id


@router.post("/sandboxes-cold", status_code=201, responses=CREATE_ERRORS, response_model_exclude_none=True)
async def create_cold(
    body: CreateCold, serving: Serving, request: Request, response: Response, idempotency_key: Key = None
) -> Sandbox:
    """Launch a container image. The first time it is built, which takes as long as the image needs."""
    if idempotency_key is not None:
        raise refuse(
            400, "Idempotency-Key is not supported here: give it to POST /v2/sandboxes", error_code="unsupported"
        )
    if (part := body.refused()) is not None:
        raise refuse(400, f"{part} is not supported", error_code="unsupported")
    reference = await while_connected(request.receive, _built(serving, body))
    info = await launch(serving, body.of(reference), request)
    response.headers["x-agentenv-sandbox-id"] = info.sandbox_id
    return Sandbox.of(info, serving)
