"""What the daemon needs of a kernel, in a machine of each driver: attributes, notices of changes, the loopback."""

from __future__ import annotations

import asyncio

from tests.contracts.envd_daemon import Client, tunnel
from tests.contracts.machines import Bench, let_go_on, sh

SCRIPT = "mkdir /tmp/d; echo content >/tmp/d/f; busybox httpd -p 127.0.0.1:8000 -h /tmp"


async def test_the_daemon_meets_its_protocol_in_a_machine(bench: Bench) -> None:
    async with bench.child() as machine:
        await let_go_on(machine)
        base = machine.endpoint.url
        client = Client(base, "proto")
        async with client.http:
            headers = {"Content-Type": "application/octet-stream", "X-Metadata-Build": "7"}
            answer = await client.http.post("/files", params={"path": "/f"}, content=b"x", headers=headers)
            # gVisor hands no attributes on to the files of a host directory.
            metadata = {} if bench.name == "gvisor" else {"build": "7"}
            (written,) = answer.json()
            entry = (await client.ok("filesystem.Filesystem/Stat", {"path": "/f"}))["entry"]
            assert (written.get("metadata", {}), entry["metadata"]) == (metadata, metadata)
            watch = {"path": "/tmp", "recursive": True}
            watcher = await client.ok("filesystem.Filesystem/CreateWatcher", watch)
            await sh(machine, SCRIPT)
            names: set[str] = set()
            async with asyncio.timeout(60):
                while "d/f" not in names:
                    events = await client.ok("filesystem.Filesystem/GetWatcherEvents", watcher)
                    names |= {event["name"] for event in events["events"]}
                    await asyncio.sleep(0.1)
            status, page = await tunnel(base, 8000, b"GET /d/f HTTP/1.0\r\n\r\n")
            assert status == b"HTTP/1.1 101 Switching Protocols"
            assert page.endswith(b"\r\n\r\ncontent\n")
