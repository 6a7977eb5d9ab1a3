"""Changes of directories, as the guest daemon tells them: by a stream, and to those who ask; in both codecs."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.contracts.envd_daemon import SOURCE, Client, Json

pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason="the source of envd is not here")

FS = "filesystem.Filesystem/"


def short(event: Json) -> tuple[str, str]:
    return event["type"].removeprefix("EVENT_TYPE_").lower(), event["name"]


async def polled(client: Client, watcher: str, last: tuple[str, str]) -> list[Json]:
    """Events until the one named."""
    events: list[Json] = []
    async with asyncio.timeout(15):
        while not events or short(events[-1]) != last:
            events += (await client.ok(FS + "GetWatcherEvents", {"watcherId": watcher}))["events"]
            await asyncio.sleep(0.02)
    return events


async def test_a_watcher_collects_changes_until_it_is_removed(rpc: Client, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    request = {"path": str(tmp_path), "recursive": True, "includeEntry": True, "allowNetworkMounts": True}
    deep = (await rpc.ok(FS + "CreateWatcher", request))["watcherId"]
    flat = (await rpc.ok(FS + "CreateWatcher", {"path": str(tmp_path)}))["watcherId"]
    (tmp_path / "old" / "f").touch()
    (tmp_path / "new").mkdir()
    (tmp_path / "old" / "f").rename(tmp_path / "new" / "g")
    (tmp_path / "end").touch()
    events = await polled(rpc, deep, ("create", "end"))
    kinds = [short(event) for event in events]
    # What is found in a directory that is new is told at once, before older changes elsewhere.
    assert sorted(kind for kind in kinds if kind[0] != "chmod") == [
        ("create", "end"),
        ("create", "new"),
        ("create", "new/g"),
        ("create", "old/f"),
        ("rename", "old/f"),
    ]
    assert kinds.index(("create", "new")) < kinds.index(("create", "new/g"))
    by_kind = dict(zip(kinds, events, strict=True))
    assert by_kind["create", "new/g"]["entry"]["path"] == f"{tmp_path}/new/g"
    assert by_kind["rename", "old/f"].get("entry") is None  # it is no longer there
    flat_events = await polled(rpc, flat, ("create", "end"))
    assert [short(event) for event in flat_events] == [("create", "new"), ("create", "end")]
    assert all(event.get("entry") is None for event in flat_events)
    assert await rpc.ok(FS + "RemoveWatcher", {"watcherId": deep}) == {}
    for method in ("GetWatcherEvents", "RemoveWatcher"):
        assert await rpc.code(FS + method, {"watcherId": deep}) == "not_found"
    assert (await rpc.ok(FS + "GetWatcherEvents", {"watcherId": flat}))["events"] == []


async def test_a_stream_of_changes_ends_with_its_directory(rpc: Client, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    seen: list[tuple[str, str]] = []
    end: Json | None = None
    keepalives = 0
    request = {"path": str(root), "recursive": True}
    async with rpc.stream(FS + "WatchDir", request, {"Keepalive-Ping-Interval": "1"}) as events:
        async for flags, message in events:
            if flags == 2:
                end = message
            elif "start" in message:
                (root / "a" / "b").mkdir(parents=True)
                (root / "a" / "b" / "f").write_text("x")
            elif "keepalive" in message:
                keepalives += 1
            else:
                seen.append(short(message["filesystem"]))
            if keepalives and ("create", "a/b/f") in seen:
                shutil.rmtree(root, ignore_errors=True)
    assert end == {}
    assert [name for kind, name in seen if kind == "create"] == ["a", "a/b", "a/b/f"]
    assert [name for kind, name in seen if kind == "remove"] == ["a/b/f", "a/b", "a", "."]


async def test_what_cannot_be_watched(rpc: Client, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    for path, code in ((tmp_path / "none", "not_found"), (tmp_path / "f", "invalid_argument")):
        assert await rpc.code(FS + "CreateWatcher", {"path": str(path)}) == code
        watch = await rpc.follow(FS + "WatchDir", {"path": str(path)})
        assert watch.error is not None and watch.error["code"] == code
    limited = await rpc.follow(FS + "WatchDir", {"path": str(tmp_path)}, {"Connect-Timeout-Ms": "100"})
    assert limited.error is not None and limited.error["code"] == "deadline_exceeded"


async def test_a_watcher_outlives_the_restore_of_its_machine(envd: Client, tmp_path: Path) -> None:
    watcher = (await envd.ok(FS + "CreateWatcher", {"path": str(tmp_path)}))["watcherId"]
    assert (await envd.http.post("/init", json={"restored": True})).status_code == 204
    (tmp_path / "f").touch()
    assert short((await polled(envd, watcher, ("create", "f")))[0]) == ("create", "f")


async def test_watchers_are_bounded(envd: Client, tmp_path: Path) -> None:
    answers = [await envd.call(FS + "CreateWatcher", {"path": str(tmp_path)}) for _ in range(65)]
    assert [answer.status_code for answer in answers] == [200] * 64 + [429]
    assert answers[-1].json()["code"] == "resource_exhausted"
