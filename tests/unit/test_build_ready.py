"""ready: url, by whatever the image has to ask with; and a checkpoint, which starts nothing."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from aenv_build.running.execute import build
from aenv_build.running.ready import NOTHING_ASKS, script
from aenv_run.errors import StepFailed
from tests.unit.node_site import Site, make_site
from tests.unit.pretend_build import plan_of, workshop

ASKERS = ("curl", "python3", "wget", "bash")


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.send_header("Location", "http://127.0.0.1:9/nobody")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


async def ask(url: str, path: Path) -> int:
    """The exit code where only what is in ``path`` can be run."""
    env = {"PATH": str(path), "http_proxy": "http://127.0.0.1:9"}
    process = await asyncio.create_subprocess_exec("/bin/sh", "-c", *script(url), env=env)
    return await process.wait()


@pytest.mark.parametrize("asker", ASKERS)
async def test_up_is_200_to_399(port: int, tmp_path: Path, asker: str) -> None:
    program = shutil.which(asker, path="/usr/bin:/bin")
    if program is None:
        pytest.skip(f"{asker} is not installed: make setup brings it")
    (tmp_path / asker).symlink_to(program)
    url = f"http://127.0.0.1:{port}"
    assert await ask(f"{url}/200", tmp_path) == 0
    assert (await ask(f"{url}/302", tmp_path) == 0) is (asker != "wget")  # it follows, to where nobody is
    assert [await ask(f"{url}/{status}", tmp_path) != 0 for status in (404, 503)] == [True, True]
    assert await ask("http://127.0.0.1:9/", tmp_path) == 1


async def test_an_image_without_any_of_them_says_so(tmp_path: Path) -> None:
    assert await ask("http://127.0.0.1:9/", tmp_path) == NOTHING_ASKS
    (tmp_path / "wget").write_text("#!/bin/sh\nkill -SEGV $$\n")
    (tmp_path / "wget").chmod(0o755)
    assert await ask("http://127.0.0.1:9/", tmp_path) == NOTHING_ASKS
    (tmp_path / "wget").unlink()
    if Path("/usr/bin/bash").exists():
        (tmp_path / "bash").symlink_to("/usr/bin/bash")
        assert await ask("https://127.0.0.1:9/", tmp_path) == NOTHING_ASKS


async def test_a_step_that_cannot_ask_fails_at_once(tmp_path: Path) -> None:
    site = make_site(tmp_path / "home", tmp_path / "seed")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "version: 1\nname: r\nbase: {snapshot: tiny}\nsteps:\n- {start: serve, ready: {url: 'http://localhost/up'}}\n"
    )
    site.engine.outcomes["/up"] = NOTHING_ASKS
    with pytest.raises(StepFailed, match="no curl, python3, wget or bash"):
        await build(plan_of(site, recipe), workshop(site))


async def test_a_checkpoint_is_restored_by_what_stands_on_it(tmp_path: Path) -> None:
    site: Site = make_site(tmp_path / "home", tmp_path / "seed")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "version: 1\nname: r\nbase: {snapshot: tiny}\nsteps:\n- {id: one, run: one}\n"
        "- {id: warm, checkpoint: true}\n- {id: two, run: two}\n- {id: check, verify: check}\n"
    )
    plan = plan_of(site, recipe)
    assert [stage.memory for stage in plan.stages.values()] == [False, True, True, True]
    (output,) = (await build(plan, workshop(site))).outputs
    assert output.snapshot.memory is not None
    assert site.engine.commands == ["one", "two", "check"]
    (kept,) = [key for key in (plan.stages["warm"].key,) if key != plan.stages["one"].key]
    again = await build(plan_of(site, recipe), workshop(site))
    assert kept and again.misses == 0
