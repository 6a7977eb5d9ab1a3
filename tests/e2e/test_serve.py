"""``aenv serve`` as a process over real machines: what it loses when it is stopped or killed is nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from aenv_run import Sandbox
from aenv_run.lifecycle import State
from aenv_run.paths import Home
from tests.e2e.conftest import ROOT, environment


@dataclass
class Served:
    """A server that runs; ``port`` stays the same when another one takes its place."""

    process: subprocess.Popen[str]
    url: str
    key: str

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"X-API-Key": self.key}, timeout=120, trust_env=False)


@contextmanager
def serving(home: Home, *options: str) -> Iterator[Served]:
    """``aenv serve`` of that home; stopped in order at the end, if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "aenv_run.cli", "serve", "--port", "0", "--log-format", "json", *options],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(home),
    )
    assert process.stderr is not None
    try:
        words = process.stderr.readline().split()
        assert words[:1] == ["serving"], words + process.stderr.readlines()
        with httpx.Client(base_url=words[1], trust_env=False) as http:
            for _ in range(600):
                try:
                    assert http.get("/health").status_code == 204
                    break
                except httpx.TransportError:  # it listens, and is not there yet
                    assert process.poll() is None
        yield Served(process, words[1], (home.secrets / "api-key").read_text().strip())
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        process.stderr.close()
        assert process.wait(60) in (0, -signal.SIGKILL), said
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert not [line for line in lines if line["level"] == "error"], lines


def test_pause_resume_and_stop_over_http(home: Home) -> None:
    with serving(home, "--on-stop", "pause") as served, served.client() as http:
        made = http.post("/v2/sandboxes", json={"templateID": "tiny", "metadata": {"test": "serve"}})
        assert made.status_code == 201, made.text
        sandbox_id = made.json()["sandboxID"]
        url = f"/sandboxes/{sandbox_id}"
        sandbox = Sandbox.connect(sandbox_id, home=home)
        try:
            sandbox.files.write("/dev/shm/x", "in memory")
            sandbox.files.write("/srv/x", "on disk")
            assert http.get(f"{url}/metrics").json()[0]["memTotal"] > 0
            assert http.post(f"{url}/pause").status_code == 204
            assert http.get(url).json()["pauseMode"] == "full"
            assert http.post(f"/v2{url}/connect", json={"timeout": 600}).status_code == 201
            assert Sandbox.connect(sandbox_id, home=home).files.read("/dev/shm/x") == "in memory"
            assert http.post(f"{url}/pause", json={"memory": False}).status_code == 204
            assert http.get(url).json()["pauseMode"] == "filesystem"
            assert http.post(f"/v2{url}/connect", json={"timeout": 600}).status_code == 201
            again = Sandbox.connect(sandbox_id, home=home)
            assert again.files.read("/srv/x") == "on disk"
            assert again.commands.run("test -e /dev/shm/x").exit_code == 1  # it was booted
            log = http.get(f"/v2{url}/logs", params={"search": "paused"}).json()["logs"]
            assert [line["message"] for line in log] == ["paused with its memory", "paused, its file system only"]
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(60) == 0
            assert again.get_info().state is State.PAUSED
            with serving(home) as following, following.client() as other:
                rows = other.get("/v2/sandboxes", params={"state": "paused", "metadata": "test=serve"}).json()
                assert [row["sandboxID"] for row in rows] == [sandbox_id]
                assert other.delete(url).status_code == 204 and other.get(url).status_code == 404
        finally:
            sandbox.kill()


LIMIT, CALLS = 4, 12


def test_a_server_that_is_killed_under_load_forgets_and_doubles_nothing(home: Home) -> None:
    answered: dict[str, str] = {}

    async def ask(url: str, key: str, number: int) -> int:
        name = f"k{number}"
        headers = {"X-API-Key": key, "Idempotency-Key": name}
        body = {"templateID": "tiny", "timeout": 600, "metadata": {"test": "load", "key": name}}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as http:
            answer = await http.post("/v2/sandboxes", json=body)
        if answer.status_code == 201:
            assert answered.setdefault(name, answer.json()["sandboxID"]) == answer.json()["sandboxID"]
        else:
            assert answer.status_code in (409, 429) and answer.headers["retry-after"], answer.text
            assert answer.json()["code"] == answer.status_code
        return answer.status_code

    async def all_of(served: Served) -> list[int | BaseException]:
        calls = (ask(served.url, served.key, number) for number in range(CALLS))
        return await asyncio.gather(*calls, return_exceptions=True)

    async def killed_meanwhile(served: Served) -> None:
        calls = asyncio.create_task(all_of(served))
        async with httpx.AsyncClient(
            base_url=served.url, headers={"X-API-Key": served.key}, trust_env=False
        ) as http:
            while not (await http.get("/v2/sandboxes", params={"metadata": "test=load"})).json():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        served.process.kill()
        for outcome in await calls:
            assert isinstance(outcome, int | httpx.TransportError), outcome

    try:
        with serving(home, "--max-sandboxes", str(LIMIT)) as served:
            asyncio.run(killed_meanwhile(served))
        with serving(home, "--max-sandboxes", str(LIMIT)) as served, served.client() as http:
            for _ in range(60):  # what the node was at when the server was killed is taken back first
                outcomes = asyncio.run(all_of(served))
                if 409 not in outcomes:
                    break
            assert set(outcomes) <= {201, 429}, outcomes
            rows = http.get("/v2/sandboxes", params={"metadata": "test=load"}).json()
            assert {row["metadata"]["key"]: row["sandboxID"] for row in rows} == answered and len(rows) == LIMIT
    finally:
        for info in Sandbox.list(home=home):
            if info.metadata.get("test") == "load":
                Sandbox.connect(info.sandbox_id, home=home).kill()
