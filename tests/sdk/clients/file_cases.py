"""Files, watching, git."""

from __future__ import annotations

import io
from typing import Any

from cases import Site, accepts, case, each, got, raises, until
from e2b import FileNotFoundException, FilesystemEventType, FileType, InvalidArgumentException

BYTES = bytes(range(256)) * 4096


@case("files.write, read")
async def text(site: Site) -> None:
    files = site.sandbox.files
    written = await got(files.write("/tmp/sdk/a/text.txt", "häl\0lo\n"))
    assert (written.path, written.name) == ("/tmp/sdk/a/text.txt", "text.txt")
    assert await got(files.read("/tmp/sdk/a/text.txt")) == "häl\0lo\n"
    await got(files.write("/tmp/sdk/empty", ""))
    assert await got(files.read("/tmp/sdk/empty")) == ""
    await got(files.write("relative", "in the home"))
    assert await got(files.read("/home/user/relative")) == "in the home"
    await raises(FileNotFoundException, lambda: files.read("/tmp/sdk/missing"))
    await raises(InvalidArgumentException, lambda: files.read("/tmp/sdk"))


@case("files.write, read: bytes")
async def data(site: Site) -> None:
    await got(site.sandbox.files.write("/tmp/sdk/bytes", BYTES))
    assert await got(site.sandbox.files.read("/tmp/sdk/bytes", format="bytes")) == BYTES


@case("files.write, read: streams")
async def streams(site: Site) -> None:
    await got(site.sandbox.files.write("/tmp/sdk/stream", io.BytesIO(BYTES)))
    stream = await got(site.sandbox.files.read("/tmp/sdk/stream", format="stream"))
    assert b"".join([bytes(part) async for part in each(stream)]) == BYTES


@case("files.write, read: gzip, metadata")
async def options(site: Site) -> None:
    files = site.sandbox.files
    accepts(files.write, "gzip", "metadata")
    path = "/dev/shm/packed"  # the disk of gVisor at level root has no attributes
    await got(files.write(path, "text" * 1000, gzip=True, metadata={"origin": "sdk"}))
    assert await got(files.read(path, gzip=True)) == "text" * 1000
    assert (await got(files.get_info(path))).metadata == {"origin": "sdk"}


@case("files.write_files")
async def several(site: Site) -> None:
    entries: list[dict[str, Any]] = [{"path": f"/tmp/sdk/several/{i}", "data": str(i)} for i in range(3)]
    written = await got(site.sandbox.files.write_files(entries))
    assert [one.path for one in written] == [one["path"] for one in entries]
    assert await got(site.sandbox.files.read("/tmp/sdk/several/2")) == "2"


@case("files.list")
async def listing(site: Site) -> None:
    files = site.sandbox.files
    await got(site.sandbox.commands.run("ln -s several /tmp/sdk/link"))
    found = {one.name: one for one in await got(files.list("/tmp/sdk"))}
    assert found["several"].type == FileType.DIR and found["bytes"].type == FileType.FILE
    assert found["bytes"].size == len(BYTES)
    if hasattr(FileType, "SYMLINK"):  # older versions leave links out
        assert found["link"].symlink_target == "several", found["link"]
    deep = [one.path for one in await got(files.list("/tmp/sdk", depth=2))]
    assert "/tmp/sdk/several/1" in deep
    await raises(FileNotFoundException, lambda: files.list("/tmp/sdk/missing"))


@case("files.exists")
async def exists(site: Site) -> None:
    assert await got(site.sandbox.files.exists("/tmp/sdk/bytes")) is True
    assert await got(site.sandbox.files.exists("/tmp/sdk/missing")) is False


@case("files.get_info")
async def info(site: Site) -> None:
    found = await got(site.sandbox.files.get_info("/tmp/sdk/bytes"))
    assert (found.name, found.path, found.size, found.owner) == ("bytes", "/tmp/sdk/bytes", len(BYTES), "user")
    assert found.permissions.endswith("rw-r--r--") and found.mode & 0o777 == 0o644, found
    await raises(FileNotFoundException, lambda: site.sandbox.files.get_info("/tmp/sdk/missing"))


@case("files.make_dir")
async def make_dir(site: Site) -> None:
    assert await got(site.sandbox.files.make_dir("/tmp/sdk/new/dir")) is True
    assert await got(site.sandbox.files.make_dir("/tmp/sdk/new/dir")) is False


@case("files.rename")
async def rename(site: Site) -> None:
    moved = await got(site.sandbox.files.rename("/tmp/sdk/bytes", "/tmp/sdk/new/moved"))
    assert moved.path == "/tmp/sdk/new/moved"
    assert not await got(site.sandbox.files.exists("/tmp/sdk/bytes"))
    await raises(FileNotFoundException, lambda: site.sandbox.files.rename("/tmp/sdk/bytes", "/tmp/sdk/other"))


@case("files.remove")
async def remove(site: Site) -> None:
    await got(site.sandbox.files.remove("/tmp/sdk/new"))
    assert not await got(site.sandbox.files.exists("/tmp/sdk/new/moved"))


async def watched(site: Site, recursive: bool, path: str) -> None:
    """Watch, write, and see it."""
    files = site.sandbox.files
    await got(files.make_dir("/tmp/watched/deep"))
    seen: list[Any] = []
    if site.mode == "sync":
        handle = files.watch_dir("/tmp/watched", recursive=recursive)
    else:
        handle = await files.watch_dir("/tmp/watched", seen.append, recursive=recursive)
    await got(files.write(f"/tmp/watched/{path}", "text"))

    async def look() -> bool:
        if site.mode == "sync":
            seen.extend(handle.get_new_events())
        return any((one.name, one.type) == (path, FilesystemEventType.WRITE) for one in seen)

    await until(look)
    assert any((one.name, one.type) == (path, FilesystemEventType.CREATE) for one in seen), seen
    await got(handle.stop())
    await got(files.remove("/tmp/watched"))


@case("files.watch_dir")
async def watch(site: Site) -> None:
    await watched(site, False, "new.txt")
    arguments = ["/tmp/missing"] if site.mode == "sync" else ["/tmp/missing", print]
    await raises(FileNotFoundException, lambda: site.sandbox.files.watch_dir(*arguments))


@case("files.watch_dir, recursive")
async def watch_all(site: Site) -> None:
    await watched(site, True, "deep/new.txt")


@case("git")
async def git(site: Site) -> None:
    run = site.sandbox.git
    await got(run.init("/tmp/repo", initial_branch="trunk"))
    await got(run.configure_user("One", "one@example.invalid"))
    await got(site.sandbox.files.write("/tmp/repo/file", "text"))
    await got(run.add("/tmp/repo"))
    await got(run.commit("/tmp/repo", "First: it's one"))
    await got(run.create_branch("/tmp/repo", "side"))
    status = await got(run.status("/tmp/repo"))
    assert status.current_branch == "side" and not status.file_status, status
    branches = await got(run.branches("/tmp/repo"))
    assert sorted(branches.branches) == ["side", "trunk"], branches
    await got(run.clone("/tmp/repo", "/tmp/clone"))
    assert await got(site.sandbox.files.read("/tmp/clone/file")) == "text"
