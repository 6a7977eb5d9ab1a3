"""Files of the guest daemon over plain HTTP: who may, what is kept with them, parts, limits; and its tunnels."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import os
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import AenvError, NotFound, SandboxDead, Unauthenticated
from aenv_run.guest import Guest, open_port
from tests.contracts.envd_daemon import SOURCE, Client, daemon
from tests.ordinary_user import propagation

pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason="the source of envd is not here")

OCTETS = {"Content-Type": "application/octet-stream"}


def signed(path: str, operation: str, token: str, expiration: int | None = None) -> dict[str, str]:
    """The query of a signed URL, as E2B's SDKs make it."""
    text = f"{path}:{operation}::{token}" + ("" if expiration is None else f":{expiration}")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    query = {"path": path, "signature": f"v1_{digest}"}
    return query if expiration is None else {**query, "signature_expiration": str(expiration)}


async def test_a_signed_url_opens_one_file(envd: Client, tmp_path: Path) -> None:
    assert (await envd.http.post("/init", json={"accessToken": "secret"})).status_code == 204
    path, now = str(tmp_path / "f"), int(time.time())
    write, read = signed(path, "write", "secret", now + 60), signed(path, "read", "secret")
    assert (await envd.http.post("/files", params=write, content=b"x", headers=OCTETS)).status_code == 200
    assert (await envd.http.get("/files", params=read)).content == b"x"
    for query in (
        {"path": path},
        {**read, "path": "/etc/passwd"},
        signed(path, "write", "secret"),
        signed(path, "read", "other"),
        signed(path, "read", "secret", now - 60),
    ):
        refused = await envd.http.get("/files", params=query)
        assert (refused.status_code, refused.json()["code"]) == (401, 401)
    assert (await envd.http.get("/envs", params=read)).status_code == 401


async def test_metadata_stays_with_a_file_until_it_is_written_anew(rpc: Client, tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    try:
        os.setxattr(tmp_path, "user.aenv", b"")
    except OSError:
        pytest.skip("this file system has no user attributes")

    async def write(metadata: dict[str, str]) -> object:
        headers = {**OCTETS, **{f"X-Metadata-{key}": value for key, value in metadata.items()}}
        return (await rpc.http.post("/files", params={"path": path}, content=b"x", headers=headers)).json()

    async def told() -> object:
        entry = (await rpc.ok("filesystem.Filesystem/Stat", {"path": path}))["entry"]
        return entry.get("metadata", {})

    assert await write({"Build": "7", "Owner": "me"}) == [
        {"path": path, "name": "f", "type": "file", "metadata": {"build": "7", "owner": "me"}}
    ]
    assert await told() == {"build": "7", "owner": "me"}
    moved = await rpc.ok("filesystem.Filesystem/Move", {"source": path, "destination": f"{path}2"})
    assert moved["entry"]["metadata"] == {"build": "7", "owner": "me"}
    (listed,) = (await rpc.ok("filesystem.Filesystem/ListDir", {"path": str(tmp_path)}))["entries"]
    assert listed["metadata"] == {"build": "7", "owner": "me"}
    path += "2"
    await write({"build": "8"})
    assert await told() == {"build": "8"}
    assert await write({}) == [{"path": path, "name": "f2", "type": "file"}]
    assert await told() == {}
    too_long = await rpc.http.post(
        "/files", params={"path": path}, headers={**OCTETS, "X-Metadata-" + "k" * 300: "x"}
    )
    assert too_long.status_code == 400


async def test_parts_become_one_file(envd: Client, tmp_path: Path) -> None:
    parts = [tmp_path / name for name in ("1", "2", "3")]
    for part in parts:
        part.write_text(part.name * 3)
    whole = tmp_path / "new" / "whole"
    request = {"source_paths": [str(part) for part in parts], "destination": str(whole)}
    missing = {**request, "source_paths": [str(parts[0]), str(tmp_path / "none")]}
    assert (await envd.http.post("/files/compose", json=missing)).status_code == 404
    assert all(part.exists() for part in parts)
    answer = await envd.http.post("/files/compose", json=request)
    assert answer.json() == {"path": str(whole), "name": "whole", "type": "file"}
    assert whole.read_text() == "111222333"
    assert [one.name for one in tmp_path.rglob("*")] == ["new", "whole"]


async def test_a_changed_file_is_not_resumed(envd: Client, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"0123456789")
    query = {"path": str(file)}
    tag = (await envd.http.get("/files", params=query, headers={"Accept-Encoding": "identity"})).headers["etag"]
    resume = {"Range": "bytes=6-", "If-Range": tag}
    same = await envd.http.get("/files", params=query, headers=resume)
    assert (same.status_code, same.content) == (206, b"6789")
    file.write_bytes(b"abcdefghij")
    changed = await envd.http.get("/files", params=query, headers=resume)
    assert (changed.status_code, changed.content) == (200, b"abcdefghij")


async def test_a_large_upload_does_not_fill_the_memory(envd: Client, tmp_path: Path) -> None:
    async def peak_kib() -> int:
        return int((await envd.shell("awk '/VmHWM/ {print $2}' /proc/$PPID/status")).stdout)

    before = await peak_kib()
    headers = {**OCTETS, "Content-Encoding": "gzip"}
    content = gzip.compress(bytes(64 << 20), 1)
    answer = await envd.http.post("/files", params={"path": str(tmp_path / "f")}, content=content, headers=headers)
    assert answer.status_code == 200 and (tmp_path / "f").stat().st_size == 64 << 20
    assert await peak_kib() - before < 16 << 10


async def test_a_full_disk_is_told_as_such(binary: Path, tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=64k,mode=777 none "$0" && exec "$@"'
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]  # in a chroot nobody may make a user namespace
    within = ["unshare", *as_root, "--mount", "--propagation", propagation(), "sh", "-c", script, str(tmp_path)]
    with daemon(binary, within) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            query = {"path": str(tmp_path / "f")}
            full = await http.post("/files", params=query, content=bytes(1 << 20), headers=OCTETS)
            assert (full.status_code, full.json()["code"]) == (507, 507)
            assert "no space" in full.json()["message"]
            for name in ("1", "2"):
                part = {"path": str(tmp_path / name)}
                await http.post("/files", params={"path": str(tmp_path / "f")}, content=b"", headers=OCTETS)
                answer = await http.post("/files", params=part, content=bytes(28 << 10), headers=OCTETS)
                assert answer.status_code == 200
            request = {"source_paths": [str(tmp_path / n) for n in "12"], "destination": str(tmp_path / "f")}
            assert (await http.post("/files/compose", json=request)).status_code == 507
            kept = await http.get("/files", params={"path": str(tmp_path / "1")})
            assert kept.content == bytes(28 << 10)


async def test_a_large_upload_that_is_refused_in_its_middle_says_why(binary: Path, tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m,nr_inodes=50,mode=777 none "$0" && exec "$@"'
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    within = ["unshare", *as_root, "--mount", "--propagation", propagation(), "sh", "-c", script, str(tmp_path)]

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 20)

    many = io.BytesIO()
    with tarfile.open(fileobj=many, mode="w") as tar:
        for number in range(20_000):
            tar.addfile(tarfile.TarInfo(f"f{number}"))
    with daemon(binary, within) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            query = {"path": str(tmp_path / "f")}
            full = await http.post("/files", params=query, content=pieces(), headers=OCTETS)
            assert full.status_code == 507 and "no space" in full.json()["message"]
        host, _, port = url.removeprefix("http://").partition(":")
        async with Guest(Endpoint(host, int(port))) as guest:
            for _ in range(3):
                with pytest.raises(AenvError, match="no space") as refused:
                    await guest.put_archive(str(tmp_path), _once(many.getvalue()))
                assert not isinstance(refused.value, SandboxDead)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_any_port_of_the_loopback_is_reached_through_the_daemon(envd: Client) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"got " + await reader.read())
        writer.close()

    await envd.http.post("/init", json={"accessToken": "secret"})
    host, _, port = envd.base.removeprefix("http://").partition(":")
    daemon_at = Endpoint(host, int(port))
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        service = server.sockets[0].getsockname()[1]
        reader, writer = await open_port(daemon_at, service, access_token="secret")
        writer.write(b"bytes")
        writer.write_eof()
        assert await reader.read() == b"got bytes"
        writer.close()
        with pytest.raises(Unauthenticated):
            await open_port(daemon_at, service, access_token="wrong")
    with pytest.raises(NotFound, match=f"nothing listens on port {service}"):
        await open_port(daemon_at, service, access_token="secret")
    with pytest.raises(SandboxDead):
        await open_port(Endpoint("127.0.0.1", service), 80, access_token=None)
