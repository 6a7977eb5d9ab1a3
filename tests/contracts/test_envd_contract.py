"""The guest daemon, driven over HTTP as the SDKs drive it."""

from __future__ import annotations

import asyncio
import base64
import getpass
import gzip
import io
import os
import stat
import tarfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from aenv_run.drivers.protocol import Endpoint
from aenv_run.errors import Conflict
from aenv_run.guest import Guest, GuestMetrics, Identity
from tests.contracts.envd_daemon import SOURCE, Client, Json, Outcome, auth, envelope, start_request

pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason="the source of envd is not here")


async def until(what: str, condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 15
    while not await condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- the daemon itself


async def test_health_needs_nothing(envd: Client) -> None:
    answer = await envd.http.get("/health")
    assert (answer.status_code, answer.content, answer.headers["cache-control"]) == (204, b"", "no-store")


async def test_metrics_and_info(envd: Client) -> None:
    metrics = (await envd.http.get("/metrics")).json()
    assert metrics["cpu_count"] > 0
    assert 0 < metrics["mem_used"] < metrics["mem_total"]
    assert metrics["mem_total_mib"] == metrics["mem_total"] >> 20
    assert 0 < metrics["disk_used"] <= metrics["disk_total"]
    read = GuestMetrics.model_validate(metrics)
    assert (read.cpu_count, read.mem_total_bytes) == (metrics["cpu_count"], metrics["mem_total"])
    assert (read.disk_used_bytes, read.mem_used_bytes) == (metrics["disk_used"], metrics["mem_used"])
    info = (await envd.http.get("/aenv/info")).json()
    wanted = {"version", "bootId", "hostname", "machineId", "uptimeSeconds", "architecture", "kernel"}
    assert set(info) == wanted | {"freezes"}
    assert info["freezes"] is False  # nothing of a host is frozen


async def test_init_replaces_the_environment_and_refuses_unknown_fields(envd: Client) -> None:
    for variables in ({"A": "1", "B": "2"}, {"C": "3"}):
        assert (await envd.http.post("/init", json={"envVars": variables})).status_code == 204
        assert (await envd.http.get("/envs")).json() == variables
    assert (await envd.shell("echo $A$C")).stdout == b"3\n"
    for body in ({"unknown": 1}, {"machineId": "no"}, {"hyperloopIP": "10.0.0.1"}):
        answer = await envd.http.post("/init", json=body)
        assert (answer.status_code, answer.json()["code"]) == (400, 400)


async def test_the_identity_of_a_host_is_only_told_not_set(envd: Client) -> None:
    entropy = base64.b64encode(os.urandom(64)).decode()
    body = {
        "hostname": "sandbox-1",
        "machineId": "ab" * 16,
        "entropy": entropy,
        "timestamp": "2040-01-01T00:00:00Z",
    }
    before = (os.uname().nodename, Path("/proc/sys/kernel/random/boot_id").read_text())
    assert (await envd.http.post("/init", json=body)).status_code == 204
    info = (await envd.http.get("/aenv/info")).json()
    assert (info["hostname"], info["machineId"]) == ("sandbox-1", "ab" * 16)
    assert info["bootId"] != before[1].strip()
    assert (os.uname().nodename, Path("/proc/sys/kernel/random/boot_id").read_text()) == before
    assert time.time() < 2_200_000_000


async def test_token(envd: Client) -> None:
    assert (await envd.http.post("/init", json={"accessToken": "one"})).status_code == 204
    assert (await envd.http.get("/envs")).status_code == 401
    assert (await envd.http.get("/health")).status_code == 204
    assert await envd.code("process.Process/List", {}) == "unauthenticated"
    assert (await envd.http.post("/init", json={"accessToken": "two"})).status_code == 409
    assert (await envd.http.post("/init", json={})).status_code == 401
    envd.http.headers["X-Access-Token"] = "two"
    assert (await envd.http.get("/files", params={"path": "/x"})).status_code == 401
    envd.http.headers["X-Access-Token"] = "one"
    assert (await envd.http.get("/envs")).status_code == 200
    detached = await envd.http.post("/aenv/detach?sync=1")
    assert (detached.status_code, detached.headers["connection"]) == (204, "close")
    assert (await envd.http.post("/init", json={"accessToken": "two"})).status_code == 204
    assert (await envd.http.get("/envs")).status_code == 401


async def test_restored_closes_the_streams_of_before_and_keeps_their_processes(envd: Client) -> None:
    outcome = Outcome()
    with pytest.raises(httpx.RemoteProtocolError):
        async with envd.stream("process.Process/Start", start_request("sleep", "60", cwd="/")) as events:
            async for flags, event in events:
                outcome.take(flags, event)
                async with httpx.AsyncClient(base_url=envd.base) as node:
                    answer = await node.post("/init", json={"restored": True})
                    assert answer.status_code == 204
    assert [p["pid"] for p in (await envd.ok("process.Process/List", {}))["processes"]] == [outcome.pid]


async def test_what_is_not_there_says_so(rpc: Client) -> None:
    assert await rpc.code("process.Process/Nothing", {}) == "unimplemented"
    answer = await rpc.http.post("/process.Process/List", headers={"Content-Type": "application/avro"})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")


# --- exec truths


@pytest.mark.parametrize(
    ("script", "code", "exited", "status"),
    [
        ("exit 0", 0, True, "exit status 0"),
        ("exit 3", 3, True, "exit status 3"),
        ("kill -9 $$", -1, False, "signal: killed"),
        ("kill $$", -1, False, "signal: terminated"),
    ],
)
async def test_the_end_of_a_process(rpc: Client, script: str, code: int, exited: bool, status: str) -> None:
    outcome = await rpc.shell(script)
    assert outcome.error is None
    assert (outcome.order[0], outcome.order[-1]) == ("start", "end")
    end = {"exitCode": code, "exited": exited, "status": status}
    assert outcome.end == (end if code == 0 else {**end, "error": status})


async def test_output_arrives_whole_apart_and_unchanged(rpc: Client) -> None:
    script = r"printf '\342\202'; sleep 0.2; printf '\254'; printf '\377' >&2; head -c 1000000 /dev/zero"
    outcome = await rpc.shell(script)
    assert outcome.stdout == "€".encode() + bytes(1_000_000)
    assert outcome.stderr == b"\xff"


async def test_a_chunk_is_at_most_32_kib(rpc: Client) -> None:
    async with rpc.stream(
        "process.Process/Start", start_request("head", "-c300000", "/dev/zero", cwd="/")
    ) as events:
        sizes = [
            len(base64.b64decode(text))
            async for _, message in events
            for text in message.get("event", {}).get("data", {}).values()
        ]
    assert sum(sizes) == 300_000
    assert max(sizes) <= 32 * 1024


async def test_cat_without_input_ends(envd: Client) -> None:
    assert (await envd.run(start_request("cat", cwd="/"))).end == {
        "exitCode": 0,
        "exited": True,
        "status": "exit status 0",
    }


@pytest.mark.parametrize("child", ["sleep 60", "while :; do echo noise; sleep 0.01; done"])
async def test_a_child_that_holds_the_output_does_not_hold_the_call(envd: Client, child: str) -> None:
    begin = time.monotonic()
    outcome = await envd.shell(f"({child}) & echo done $!")
    assert b"done" in outcome.stdout
    assert time.monotonic() - begin < 10
    pid = int(outcome.stdout.split(b"done ")[1].split(b"\n")[0])
    assert alive(pid)
    assert (await envd.http.post("/aenv/settle")).status_code == 204
    assert not alive(pid)


async def test_the_time_limit_kills_the_whole_group(rpc: Client) -> None:
    outcome = await rpc.shell("sleep 60 & echo $!; sleep 61 | sleep 62", {"Connect-Timeout-Ms": "500"})
    assert outcome.error is not None
    assert outcome.error["code"] == "deadline_exceeded"
    assert outcome.end is None

    async def gone() -> bool:
        return not alive(outcome.pid) and not alive(int(outcome.stdout))

    await until("the group is gone", gone)


@pytest.mark.parametrize(
    ("request_", "headers", "code", "text"),
    [
        (start_request("/bin/sh", cwd="/no/such"), {}, "invalid_argument", "cwd '/no/such' does not exist"),
        (start_request("/bin/sh", cwd="/etc/passwd"), {}, "invalid_argument", "not a directory"),
        (start_request("/no/such", cwd="/"), {}, "invalid_argument", "/no/such"),
        (start_request("no-such-command", cwd="/"), {}, "invalid_argument", "PATH"),
        (start_request("/bin/sh"), auth("no-such-user"), "unauthenticated", "invalid username"),
        ({}, {}, "invalid_argument", "process"),
    ],
)
async def test_what_cannot_start_has_its_own_error(
    rpc: Client, request_: dict[str, object], headers: dict[str, str], code: str, text: str
) -> None:
    outcome = await rpc.run(request_, headers)
    assert outcome.error is not None
    assert outcome.error["code"] == code
    assert text in outcome.error["message"]
    assert outcome.order == []


async def test_environment_user_and_directory(rpc: Client, tmp_path: Path) -> None:
    await rpc.http.post("/init", json={"envVars": {"A": "global", "B": "global"}, "defaultWorkdir": str(tmp_path)})
    request = start_request(
        "/bin/sh", "-c", 'echo "$A $B $USER"; pwd; cut -d" " -f5,6 /proc/self/stat', envs={"B": "own"}
    )
    outcome = await rpc.run(request, auth(getpass.getuser()))
    session = f"{outcome.pid} {outcome.pid}"
    assert outcome.stdout.decode().splitlines() == [f"global own {getpass.getuser()}", str(tmp_path), session]


async def test_keepalive(rpc: Client) -> None:
    assert (await rpc.shell("sleep 1.4", {"Keepalive-Ping-Interval": "1"})).keepalives == 1


async def test_a_process_outlives_its_client_and_is_found_again(rpc: Client, tmp_path: Path) -> None:
    script = "while test ! -e go; do sleep 0.02; done; echo found"
    request = start_request("/bin/sh", "-c", script, cwd=str(tmp_path), tag="job")
    async with rpc.stream("process.Process/Start", request) as events:
        _, first = await anext(events)
    pid = first["event"]["start"]["pid"]
    (listed,) = (await rpc.ok("process.Process/List", {}))["processes"]
    assert (listed["pid"], listed["tag"], listed["config"]["cmd"]) == (pid, "job", "/bin/sh")

    async def attach(selector: Json) -> Outcome:
        return await rpc.follow("process.Process/Connect", {"process": selector})

    selectors: list[Json] = [{"pid": pid}, {"tag": "job"}]
    both = [asyncio.create_task(attach(selector)) for selector in selectors]
    await asyncio.sleep(0.3)
    (tmp_path / "go").touch()
    for outcome in await asyncio.gather(*both):
        assert (outcome.pid, outcome.stdout) == (pid, b"found\n")
        assert outcome.end is not None
    missing = await attach({"pid": pid})
    assert missing.error == {"code": "not_found", "message": f"process with pid {pid} not found"}
    assert (await rpc.ok("process.Process/List", {}))["processes"] == []


async def test_output_that_nobody_reads_does_not_stop_a_process(envd: Client, tmp_path: Path) -> None:
    script = "sleep 0.2; head -c 500000 /dev/zero; echo yes > through"
    request = start_request("/bin/sh", "-c", script, cwd=str(tmp_path))
    async with envd.stream("process.Process/Start", request) as events:
        await anext(events)

    async def through() -> bool:
        return (tmp_path / "through").exists()

    await until("it wrote through", through)


async def test_input_in_every_way(rpc: Client) -> None:
    running = asyncio.create_task(rpc.run({**start_request("cat", cwd="/", tag="cat"), "stdin": True}))
    by_tag = {"process": {"tag": "cat"}}

    async def listed() -> bool:
        return bool((await rpc.ok("process.Process/List", {}))["processes"])

    await until("it runs", listed)
    one, two = (base64.b64encode(text).decode() for text in (b"one ", b"two\xff"))
    assert await rpc.ok("process.Process/SendInput", {**by_tag, "input": {"stdin": one}}) == {}
    messages: list[Json] = [{"start": by_tag}, {"keepalive": {}}, {"data": {"input": {"stdin": two}}}]
    answer = await rpc.http.post(
        "/process.Process/StreamInput",
        content=b"".join(rpc.frame("process.Process/StreamInput", message) for message in messages),
        headers={"Content-Type": f"application/connect+{rpc.codec}"},
    )
    empty = b"{}" if rpc.codec == "json" else b""
    assert answer.content == envelope(empty) + b"\x02\0\0\0\x02{}"
    assert await rpc.code("process.Process/SendInput", {**by_tag, "input": {"pty": one}}) == "internal"
    assert await rpc.code("process.Process/SendInput", {**by_tag, "input": {}}) == "unimplemented"
    assert await rpc.code("process.Process/Update", {**by_tag, "pty": {"size": {"cols": 1, "rows": 1}}})
    assert await rpc.ok("process.Process/CloseStdin", by_tag) == {}
    assert (await running).stdout == b"one two\xff"
    for method in ("SendInput", "CloseStdin", "SendSignal", "Update"):
        assert await rpc.code(f"process.Process/{method}", by_tag) == "not_found"


async def test_terminal(rpc: Client) -> None:
    request = start_request("/bin/sh", "-c", "stty size; read x; stty size; echo got $x", cwd="/", tag="tty")
    request["pty"] = {"size": {"cols": 100, "rows": 30}}
    by_tag, outcome = {"process": {"tag": "tty"}}, Outcome()
    async with rpc.stream("process.Process/Start", request) as events:
        async for flags, event in events:
            outcome.take(flags, event)
            if outcome.pty == b"30 100\r\n":
                await rpc.ok("process.Process/Update", {**by_tag, "pty": {"size": {"cols": 50, "rows": 20}}})
                text = base64.b64encode(b"hi\n").decode()
                assert (
                    await rpc.code("process.Process/SendInput", {**by_tag, "input": {"stdin": text}}) == "internal"
                )
                assert await rpc.code("process.Process/CloseStdin", by_tag) == "unknown"
                await rpc.ok("process.Process/SendInput", {**by_tag, "input": {"pty": text}})
    assert b"20 50\r\ngot hi\r\n" in outcome.pty
    assert (outcome.stdout, outcome.stderr, outcome.finished) == (b"", b"", True)


@pytest.mark.parametrize(("signal", "status"), [("SIGNAL_SIGTERM", "terminated"), (9, "killed")])
async def test_signals(rpc: Client, signal: str | int, status: str) -> None:
    outcome = Outcome()
    async with rpc.stream("process.Process/Start", start_request("sleep", "60", cwd="/")) as events:
        async for flags, event in events:
            outcome.take(flags, event)
            if outcome.order == ["start"]:
                selector = {"process": {"pid": outcome.pid}}
                assert await rpc.code("process.Process/SendSignal", {**selector, "signal": 2}) == "unimplemented"
                await rpc.ok("process.Process/SendSignal", {**selector, "signal": signal})
    assert outcome.end is not None
    assert (outcome.end["status"], outcome.end["exitCode"]) == (f"signal: {status}", -1)


# --- files


async def test_filesystem(rpc: Client, tmp_path: Path) -> None:
    fs, deep = "filesystem.Filesystem/", str(tmp_path / "a" / "b")
    made = (await rpc.ok(fs + "MakeDir", {"path": deep}))["entry"]
    assert (made["name"], made["type"], made["permissions"]) == ("b", "FILE_TYPE_DIRECTORY", "drwxr-xr-x")
    assert await rpc.code(fs + "MakeDir", {"path": deep}) == "already_exists"
    (tmp_path / "a" / "f").write_bytes(b"12345")
    (tmp_path / "a" / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    assert await rpc.code(fs + "MakeDir", {"path": f"{tmp_path}/a/f"}) == "invalid_argument"
    entry = (await rpc.ok(fs + "Stat", {"path": f"{tmp_path}/a/f"}))["entry"]
    assert (entry["size"], entry["type"], entry["owner"]) == ("5", "FILE_TYPE_FILE", getpass.getuser())
    assert await rpc.code(fs + "Stat", {"path": f"{tmp_path}/none"}) == "not_found"
    assert await rpc.code(fs + "Stat", {"path": "~other"}) == "invalid_argument"
    shallow = (await rpc.ok(fs + "ListDir", {"path": str(tmp_path)}))["entries"]
    assert [e["name"] for e in shallow] == ["a", "loop"]
    listed = (await rpc.ok(fs + "ListDir", {"path": str(tmp_path), "depth": 2}))["entries"]
    assert [e["name"] for e in listed] == ["a", "b", "dangling", "f", "loop"]
    link = listed[2]
    assert (link["type"], link["symlinkTarget"]) == ("FILE_TYPE_SYMLINK", "nowhere")
    assert await rpc.code(fs + "ListDir", {"path": f"{tmp_path}/a/f"}) == "invalid_argument"
    assert await rpc.code(fs + "ListDir", {"path": f"{tmp_path}/none"}) == "not_found"
    assert await rpc.code(fs + "ListDir", {"path": f"{tmp_path}/loop"}) == "failed_precondition"
    moved = await rpc.ok(fs + "Move", {"source": f"{tmp_path}/a/f", "destination": f"{tmp_path}/new/g"})
    assert moved["entry"]["path"] == f"{tmp_path}/new/g"
    assert await rpc.code(fs + "Move", {"source": f"{tmp_path}/a/f", "destination": "/x"}) == "not_found"
    for _ in range(2):
        assert await rpc.ok(fs + "Remove", {"path": f"{tmp_path}/a"}) == {}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loop", "new"]


async def test_upload_and_download(envd: Client, tmp_path: Path) -> None:
    data, path = os.urandom(300_000), str(tmp_path / "deep" / "er" / "f.bin")
    octets = {"Content-Type": "application/octet-stream"}
    zipped = {**octets, "Content-Encoding": "gzip"}
    for content, headers in ((data, octets), (gzip.compress(data), zipped)):
        answer = await envd.http.post("/files", params={"path": path}, content=content, headers=headers)
        assert answer.json() == [{"path": path, "name": "f.bin", "type": "file"}]
        assert Path(path).read_bytes() == data
    assert (await envd.http.get("/files", params={"path": path})).content == data
    part = await envd.http.get("/files", params={"path": path}, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, data[10:20])
    plain = await envd.http.get("/files", params={"path": path}, headers={"Accept-Encoding": "identity"})
    assert int(plain.headers["content-length"]) == len(data)
    await envd.http.post("/files", params={"path": path}, content=b"", headers=octets)
    empty = await envd.http.get("/files", params={"path": path}, headers={"Accept-Encoding": "identity"})
    assert (empty.status_code, empty.headers["content-length"]) == (200, "0")


async def test_multipart_upload_keeps_the_directories_of_names(envd: Client, tmp_path: Path) -> None:
    names = [f"{tmp_path}/x/one", f"{tmp_path}/y/two"]
    parts = "".join(
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n{name}\r\n'
        for name in names
    )
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = await envd.http.post("/files", content=f"{parts}--b--\r\n", headers=headers)
    assert [e["path"] for e in answer.json()] == names
    assert [Path(name).read_text() for name in names] == names
    twice = await envd.http.post("/files", content=f"{parts}{parts}--b--\r\n", headers=headers)
    assert twice.status_code == 400


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"path": "/no/such/file"}, 404),
        ({"path": "/"}, 400),
        ({"path": "/dev/zero"}, 400),
        ({"path": "~other/x"}, 400),
        ({"path": "/etc/passwd", "username": "no-such-user"}, 401),
    ],
)
async def test_download_errors(envd: Client, query: dict[str, str], status: int) -> None:
    answer = await envd.http.get("/files", params=query)
    assert (answer.status_code, answer.json()["code"]) == (status, status)
    assert answer.json()["message"]


# --- archives


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o755) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime = kind, target, mode, 1_500_000_000
    return info


@pytest.mark.parametrize("compress", [False, True])
async def test_an_archive_goes_in_and_comes_out(envd: Client, tmp_path: Path, compress: bool) -> None:
    content = packed(
        (member("d", tarfile.DIRTYPE), b""),
        (member("d/tool", mode=0o4755), b"run me"),
        (member("hard", tarfile.LNKTYPE, "d/tool"), b""),
        (member("soft", tarfile.SYMTYPE, "/etc"), b""),
    )
    target = tmp_path / "made" / "here"
    headers = {"Content-Encoding": "gzip"} if compress else {}
    body = gzip.compress(content) if compress else content
    answer = await envd.http.put("/aenv/archive", params={"path": str(target)}, content=body, headers=headers)
    assert answer.json() == {"entries": 4, "bytes": 6}
    tool = (target / "d" / "tool").stat()
    assert (stat.S_IMODE(tool.st_mode), tool.st_mtime, tool.st_nlink) == (0o4755, 1_500_000_000, 2)
    out = (await envd.http.get("/aenv/archive", params={"path": str(target)})).content
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        assert archive.getnames() == ["here", "here/d", "here/d/tool", "here/hard", "here/soft"]
        assert archive.getmember("here/hard").linkname == "here/d/tool"
        assert archive.getmember("here/soft").linkname == "/etc"
    assert (await envd.http.get("/aenv/archive", params={"path": "/no/such"})).status_code == 404


@pytest.mark.parametrize(
    "members",
    [
        [member("../escape")],
        [member("link", tarfile.SYMTYPE, ".."), member("link/escape")],
        [member("link", tarfile.SYMTYPE, ".."), member("stolen", tarfile.LNKTYPE, "link/secret")],
        [member("stolen", tarfile.LNKTYPE, "../secret")],
        [member("device", tarfile.CHRTYPE)],
    ],
)
async def test_an_archive_cannot_leave_its_directory(
    envd: Client, tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    (tmp_path / "secret").write_text("intact")
    target = tmp_path / "target"
    content = packed(*((info, b"") for info in members))
    answer = await envd.http.put("/aenv/archive", params={"path": str(target)}, content=content)
    assert answer.status_code == 400
    assert members[-1].name in answer.json()["message"]
    assert (tmp_path / "secret").read_text() == "intact"
    assert (tmp_path / "secret").stat().st_nlink == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret", "target"]


async def test_sync(envd: Client) -> None:
    assert (await envd.http.post("/aenv/sync")).status_code == 204


async def test_kill_reaches_the_whole_session(envd: Client) -> None:
    outcome = Outcome()
    script = "sleep 63 & echo $!; sleep 64; true"
    async with envd.stream("process.Process/Start", start_request("/bin/sh", "-c", script, cwd="/")) as events:
        async for flags, event in events:
            outcome.take(flags, event)
            if outcome.stdout and outcome.order[-1] == "data":
                answer = await envd.http.post("/aenv/kill", params={"pid": outcome.pid})
                assert answer.status_code == 204
    assert outcome.end is not None and outcome.end["status"] == "signal: killed"

    async def gone() -> bool:
        return not alive(int(outcome.stdout))

    await until("its child is gone", gone)
    for pid, status in ((str(outcome.pid), 404), ("1", 404), ("x", 400)):
        assert (await envd.http.post("/aenv/kill", params={"pid": pid})).status_code == status


async def test_the_daemon_says_why_a_command_cannot_start(rpc: Client, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    for request, reason in (
        (start_request("no-such-command", cwd="/"), "command_not_found"),
        (start_request("/no/such", cwd="/"), "command_not_found"),
        (start_request(str(tmp_path / "plain"), cwd="/"), "command_not_executable"),
        (start_request("/bin/sh", cwd="/no/such"), "command_not_executable"),
    ):
        error = (await rpc.run(request)).error
        assert error is not None and (error["code"], error["reason"]) == ("invalid_argument", reason)


async def test_a_sandbox_that_set_its_own_token_is_said_to_have_locked_itself(envd: Client) -> None:
    assert (await envd.http.post("/init", json={"accessToken": "mine"})).is_success
    host, _, port = envd.base.removeprefix("http://").partition(":")
    async with Guest(Endpoint(host, int(port))) as guest:
        with pytest.raises(Conflict, match="locked its own daemon") as caught:
            await guest.initialise(Identity.fresh("box"))
    assert "aenv rm" in caught.value.fix
    assert (await envd.http.post("/aenv/detach", headers={"X-Access-Token": "mine"})).is_success


async def test_a_body_is_all_of_the_input(envd: Client) -> None:
    data, outcome = os.urandom(1_000_000), Outcome()
    request = {**start_request("cat", cwd="/"), "stdin": True}
    async with envd.stream("process.Process/Start", request) as events:
        async for flags, event in events:
            outcome.take(flags, event)
            if outcome.order == ["start"]:
                feeding = asyncio.create_task(
                    envd.http.put("/aenv/input", params={"pid": outcome.pid}, content=data)
                )
    assert (await feeding).status_code == 204 and outcome.stdout == data
    for pid, status in ((str(outcome.pid), 404), ("x", 400)):
        assert (await envd.http.put("/aenv/input", params={"pid": pid}, content=b"")).status_code == status
