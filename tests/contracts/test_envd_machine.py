"""What the daemon needs of a kernel, in a machine of each driver and its copy: attributes, notices, loopback."""

from __future__ import annotations

import asyncio

from aenv_run.guest import open_port
from tests.contracts.envd_daemon import Client
from tests.contracts.machines import Bench, let_go_on, prepare_capture, sh

SERVICE = "busybox httpd -p 127.0.0.1:8000 -h /tmp"
FS = "filesystem.Filesystem/"


async def test_the_daemon_meets_its_protocol_in_a_machine(bench: Bench) -> None:
    # gVisor hands no attributes on to the files of a host directory.
    metadata = {} if bench.name == "gvisor" else {"build": "7"}
    async with bench.child() as machine:
        await let_go_on(machine)
        client = Client(machine.endpoint.url, "proto")
        async with client.http:
            headers = {"Content-Type": "application/octet-stream", "X-Metadata-Build": "7"}
            answer = await client.http.post("/files", params={"path": "/f"}, content=b"x", headers=headers)
            assert answer.json()[0].get("metadata", {}) == metadata
            watcher = await client.ok(FS + "CreateWatcher", {"path": "/tmp", "recursive": True})
        await sh(machine, SERVICE)
        _, held = await open_port(machine.endpoint, 8000, access_token=None)
        await prepare_capture(machine)
        captured = await machine.capture(bench.capture_directory(), memory=True)
        held.close()
    async with bench.child(bench.seed, captured) as machine:
        client = Client(machine.endpoint.url, "proto")
        async with client.http:
            assert (await client.http.post("/init", json={"restored": True})).status_code == 204
            entry = (await client.ok(FS + "Stat", {"path": "/f"}))["entry"]
            assert (entry["size"], entry["metadata"]) == ("1", metadata)
            await sh(machine, "mkdir /tmp/d; echo content >/tmp/d/f")
            names: set[str] = set()
            async with asyncio.timeout(60):
                while "d/f" not in names:
                    events = await client.ok(FS + "GetWatcherEvents", watcher)
                    names |= {event["name"] for event in events["events"]}
                    await asyncio.sleep(0.1)
            reader, writer = await open_port(machine.endpoint, 8000, access_token=None)
            writer.write(b"GET /d/f HTTP/1.0\r\n\r\n")
            assert (await reader.read()).endswith(b"\r\n\r\ncontent\n")
            writer.close()
