"""Commands and terminals."""

from __future__ import annotations

import asyncio

import httpx
from cases import Site, case, got, has, raises, until
from e2b import CommandExitException, InvalidArgumentException, PtySize, TimeoutException


@case("commands.run")
async def run(site: Site) -> None:
    done = await got(site.sandbox.commands.run("echo out; echo err >&2; pwd"))
    assert (done.exit_code, done.stdout, done.stderr) == (0, "out\n/home/user\n", "err\n"), done
    error = await raises(CommandExitException, lambda: site.sandbox.commands.run("echo bad >&2; exit 3"))
    assert (error.exit_code, error.stderr) == (3, "bad\n")


@case("commands.run with envs, cwd, user")
async def run_with(site: Site) -> None:
    shell = "id -un; pwd; echo $HERE $FROM_IMAGE"
    done = await got(site.sandbox.commands.run(shell, envs={"HERE": "ü"}, cwd="/tmp", user="root"))
    assert done.stdout == "root\n/tmp\nü yes\n", done.stdout
    assert (await got(site.sandbox.commands.run("id -un"))).stdout == "user\n"
    await raises(InvalidArgumentException, lambda: site.sandbox.commands.run("true", cwd="/no/such"))


@case("commands.run streams")
async def run_streams(site: Site) -> None:
    out: list[str] = []
    err: list[str] = []
    shell = "echo one; echo two >&2; echo thrée"
    await got(site.sandbox.commands.run(shell, on_stdout=out.append, on_stderr=err.append))
    assert ("".join(out), "".join(err)) == ("one\nthrée\n", "two\n")


@case("commands.run past its timeout")
async def run_timeout(site: Site) -> None:
    # Version 2.20 waits no longer than the daemon: whose limit is over first, by chance, names the error.
    ends = (TimeoutException, httpx.TimeoutException)
    await raises(ends, lambda: site.sandbox.commands.run("sleep 600", timeout=1))

    async def gone() -> bool:
        return not [one for one in await got(site.sandbox.commands.list()) if "sleep 600" in one.args]

    await until(gone)


@case("commands.run in the background, wait")
async def background(site: Site) -> None:
    handle = await got(site.sandbox.commands.run("sleep 0.2; echo later; exit 4", background=True))
    assert handle.pid > 0
    error = await raises(CommandExitException, handle.wait)
    assert (error.exit_code, error.stdout) == (4, "later\n")


@case("commands.list")
async def list_commands(site: Site) -> None:
    handle = await got(site.sandbox.commands.run("sleep 601", background=True, envs={"A": "b"}, cwd="/tmp"))
    (mine,) = [one for one in await got(site.sandbox.commands.list()) if one.pid == handle.pid]
    assert mine.cmd == "/bin/bash" and mine.args == ["-l", "-c", "sleep 601"], mine
    assert mine.envs["A"] == "b" and mine.cwd == "/tmp", mine
    site.kept["sleeper"] = handle


@case("commands.kill")
async def kill(site: Site) -> None:
    handle = site.kept["sleeper"]
    assert await got(site.sandbox.commands.kill(handle.pid)) is True
    await raises(CommandExitException, handle.wait)
    assert await got(site.sandbox.commands.kill(handle.pid)) is False


@case("commands.connect, disconnect")
async def connect(site: Site) -> None:
    handle = await got(site.sandbox.commands.run("read line; echo got $line", background=True, stdin=True))
    await got(handle.disconnect())
    again = await got(site.sandbox.commands.connect(handle.pid))
    await got(site.sandbox.commands.send_stdin(handle.pid, "hällo\n"))
    assert (await got(again.wait())).stdout == "got hällo\n"


@case("commands.send_stdin")
async def send_stdin(site: Site) -> None:
    handle = await got(site.sandbox.commands.run("read a; read b; echo $b $a", background=True, stdin=True))
    await got(site.sandbox.commands.send_stdin(handle.pid, "one\n"))
    await got(site.sandbox.commands.send_stdin(handle.pid, "two\n"))
    assert (await got(handle.wait())).stdout == "two one\n"


@case("commands.close_stdin")
async def close_stdin(site: Site) -> None:
    has(site.sandbox.commands, "close_stdin")
    handle = await got(site.sandbox.commands.run("cat; echo ended", background=True, stdin=True))
    await got(site.sandbox.commands.send_stdin(handle.pid, "all\n"))
    await got(site.sandbox.commands.close_stdin(handle.pid))
    assert (await got(handle.wait())).stdout == "all\nended\n"


@case("commands.stream_input")
async def stream_input(site: Site) -> None:
    has(site.sandbox.commands, "stream_input")
    handle = await got(site.sandbox.commands.run("read a; read b; echo $b $a", background=True, stdin=True))
    if site.mode == "sync":
        site.sandbox.commands.stream_input(handle.pid, iter(["one\n", "two\n"]))
    else:
        async with site.sandbox.commands.stream_input(handle.pid) as stream:
            await stream.send("one\n")
            await stream.send("two\n")
    assert (await got(handle.wait())).stdout == "two one\n"


class Terminal:
    """A pty of either mode, and what it showed."""

    def __init__(self, site: Site) -> None:
        self.site, self.shown = site, b""

    async def create(self) -> None:
        size = PtySize(rows=24, cols=80)
        pty = self.site.sandbox.pty
        if self.site.mode == "sync":
            self.handle = pty.create(size, cwd="/tmp")
        else:
            self.handle = await pty.create(size, self.show, cwd="/tmp")

    async def connect(self, pid: int) -> None:
        pty = self.site.sandbox.pty
        if self.site.mode == "sync":
            self.handle = pty.connect(pid)
        else:
            self.handle = await pty.connect(pid, self.show)

    def show(self, data: bytes) -> None:
        self.shown += data

    async def type(self, text: str) -> None:
        await got(self.site.sandbox.pty.send_stdin(self.handle.pid, text.encode()))

    async def ends(self) -> bytes:
        """All of what it showed, once its shell has exited."""
        if self.site.mode == "sync":
            self.handle.wait(on_pty=self.show)
        else:
            await self.handle.wait()
        return self.shown


@case("pty.create, send_stdin, resize")
async def pty(site: Site) -> None:
    terminal = Terminal(site)
    await terminal.create()
    await got(site.sandbox.pty.resize(terminal.handle.pid, PtySize(rows=33, cols=99)))
    await terminal.type("stty size; pwd; echo $TERM; exit\n")
    shown = await terminal.ends()
    assert b"33 99" in shown and b"/tmp" in shown and b"xterm-256color" in shown, shown


@case("pty.connect")
async def pty_connect(site: Site) -> None:
    first, second = Terminal(site), Terminal(site)
    await first.create()
    await got(first.handle.disconnect())
    await second.connect(first.handle.pid)
    await second.type("echo $((6 * 7)); exit\n")
    assert b"42" in await second.ends()


@case("pty.kill")
async def pty_kill(site: Site) -> None:
    terminal = Terminal(site)
    await terminal.create()
    assert await got(site.sandbox.pty.kill(terminal.handle.pid)) is True
    await raises(CommandExitException, terminal.ends)
    await asyncio.sleep(0)
    assert await got(site.sandbox.pty.kill(terminal.handle.pid)) is False
