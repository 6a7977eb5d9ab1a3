"""Images from a real registry on loopback, filled with skopeo; a proxy before it fails on purpose."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from aenv_build.bases.image import ImageSource, ResolvedImage, make_image_tree
from aenv_build.language.image_reference import parse_image
from aenv_run.errors import AenvError, BaseUnavailable
from aenv_run.types import Architecture
from tests.cases.image_layers import entry, file, folder, shown
from tests.images import Fault, Layout, Proxy, attestation, on, proxy, registry, skopeo, write_settings

AMD64 = Architecture("amd64")
LOWER = [folder("d"), file("d/a", "1"), entry("big", data=os.urandom(300_000))]
UPPER = [file("d/.wh.a"), file("b", "2")]
#: The user "anna" with the password "secret", by htpasswd -B.
HTPASSWD = "anna:$2y$05$jLNT9mDwwBuqRwrPdUC44OrQvMVjkgFHQJdBAaz99mdTlpHkWF0Tu\n"


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with settings of their own for skopeo."""
    home = tmp_path / "user"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "run"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry for all tests of this file; each has repositories of its own."""
    with registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def faulty(host: str, user: Path) -> Iterator[Proxy]:
    with proxy(host) as found:
        write_settings(user, host, found.host, mirrors={"mirrored.example": found.host})
        yield found


def pushed(folder: Path, host: str, name: str) -> Layout:
    """An image of two layers, in an index with an attestation, as ``name`` in the registry."""
    layout = Layout(folder / "layout")
    image = layout.image(LOWER, UPPER, config={"Env": ["A=1"], "WorkingDir": "/w"})
    arm = layout.image(UPPER, architecture="arm64")
    layout.name("x", layout.index(on(image, "amd64"), on(arm, "arm64"), attestation(arm)))
    skopeo("copy", "--all", f"oci:{layout.folder}:x", f"docker://{host}/{name}")
    return layout


def source(tmp_path: Path, name: str) -> ImageSource:
    return ImageSource(parse_image(name).at(tmp_path), tmp_path / "kept", first_wait_s=0.01)


async def tree(tmp_path: Path, image: ResolvedImage) -> dict[str, str]:
    await make_image_tree(image, tmp_path / "scratch", tmp_path / "tree", disk_mib=64)
    (tmp_path / "tree" / "big").unlink()
    assert not (tmp_path / "scratch").exists()
    return shown(tmp_path / "tree")


@pytest.mark.skipif(os.geteuid() != 0, reason="unpacking a root file system needs root")
async def test_pulled_by_tag_and_by_digest(tmp_path: Path, faulty: Proxy, host: str) -> None:
    """A tag that moved is another image. A digest is, once it was seen, asked for nowhere."""
    pushed(tmp_path, host, "a/one:1")
    image = await source(tmp_path, f"docker://{faulty.host}/a/one:1").resolve(AMD64)
    assert (image.context.env, image.context.workdir) == ({"A": "1"}, "/w")
    assert await tree(tmp_path, image) == {"b": "f:2", "d": "d", "w": "d"}

    pinned = source(tmp_path, f"docker://{faulty.host}/a/one:1@{image.manifest_digest}")
    faulty.asked.clear()
    assert (await pinned.resolve(AMD64)).manifest_digest == image.manifest_digest
    assert faulty.asked == []

    other = Layout(tmp_path / "other")
    other.name("x", other.image(UPPER))
    skopeo("copy", f"oci:{other.folder}:x", f"docker://{host}/a/one:1")
    moved = await source(tmp_path, f"docker://{faulty.host}/a/one:1").resolve(AMD64)
    assert moved.manifest_digest == other.entries[0]["digest"] != image.manifest_digest
    assert (await pinned.resolve(AMD64)).manifest_digest == image.manifest_digest


async def test_a_mirror_is_asked_first(tmp_path: Path, faulty: Proxy, host: str) -> None:
    pushed(tmp_path, host, "a/mirrored:1")
    await source(tmp_path, "docker://mirrored.example/a/mirrored:1").resolve(AMD64)
    assert any("/a/mirrored/" in path for path in faulty.asked)


@pytest.mark.skipif(os.geteuid() != 0, reason="unpacking a root file system needs root")
@pytest.mark.parametrize("form", ["docker-archive", "oci"])
async def test_files_hold_the_same_image(tmp_path: Path, host: str, user: Path, form: str) -> None:
    write_settings(user, host)
    pushed(tmp_path, host, "a/files:1")
    images = []
    for place in ("saved", "again"):
        name = f"{place}:a/files:1" if form == "docker-archive" else f"{place}:1"
        target = f"{form}:{tmp_path}/{name}"
        skopeo("copy", "--override-arch", "amd64", f"docker://{host}/a/files:1", target)
        images.append(await source(tmp_path, f"{form}:{name}").resolve(AMD64))
    first, again = images
    assert first.manifest_digest == again.manifest_digest
    assert (first.context.env, first.context.workdir) == ({"A": "1"}, "/w")
    assert await tree(tmp_path, first) == {"b": "f:2", "d": "d", "w": "d"}


async def test_files_that_are_none(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.name("x", layout.image(UPPER))
    skopeo("copy", f"oci:{layout.folder}:x", f"docker-archive:{tmp_path}/whole:a/b:1")
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:1500])
    for name in ("absent", "cut", "whole:other:1"):  # some versions of skopeo read a packed one
        assert "the file is not there" in (await told(tmp_path, f"docker-archive:{name}")).message


async def told(tmp_path: Path, name: str) -> AenvError:
    """The error of a build from the image, whichever part of it fails."""
    try:
        image = await source(tmp_path, name).resolve(AMD64)
        await make_image_tree(image, tmp_path / "scratch", tmp_path / "tree", disk_mib=64)
    except BaseUnavailable as error:
        assert name in error.message and error.fix
        assert not (tmp_path / "scratch").exists() and not (tmp_path / "tree").exists()
        return error
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("fault", "reason", "asked"),
    [
        (Fault("/manifests/", status=404), "no such image, tag or layer (404)", 1),
        (Fault("/blobs/", status=404), "no such image, tag or layer (404)", 1),
        (Fault("/manifests/", status=401), "right login (401)", 1),
        (Fault("/manifests/", status=403), "may not read it (403)", 1),
        (Fault("/manifests/", status=503), "the transfer broke off", 3),
        (Fault("/manifests/", body=b"<html>a login page</html>"), "", 1),
    ],
    ids=lambda value: f"{value.status}" if isinstance(value, Fault) else None,
)
async def test_refusals_are_typed(
    tmp_path: Path, faulty: Proxy, host: str, fault: Fault, reason: str, asked: int
) -> None:
    pushed(tmp_path, host, "a/refused:1")
    faulty.faults.append(fault)
    error = await told(tmp_path, f"docker://{faulty.host}/a/refused:1")
    assert reason in error.message
    assert len([path for path in faulty.asked if fault.path in path]) >= asked


async def test_too_many_requests_are_waited_for(tmp_path: Path, faulty: Proxy, host: str) -> None:
    pushed(tmp_path, host, "a/busy:1")
    faulty.faults.append(Fault("/manifests/", status=429, times=2))
    await source(tmp_path, f"docker://{faulty.host}/a/busy:1").resolve(AMD64)


async def test_too_many_requests_for_too_long(tmp_path: Path, faulty: Proxy, host: str) -> None:
    pushed(tmp_path, host, "a/busier:1")
    faulty.faults.append(Fault("/manifests/", status=429))
    error = await told(tmp_path, f"docker://{faulty.host}/a/busier:1")
    assert "allows no more requests now (429)" in error.message and "mirror" in error.fix


@pytest.mark.skipif(os.geteuid() != 0, reason="unpacking a root file system needs root")
async def test_a_broken_transfer_is_taken_up_again(tmp_path: Path, faulty: Proxy, host: str) -> None:
    layout = pushed(tmp_path, host, "a/broken:1")
    image = await source(tmp_path, f"docker://{faulty.host}/a/broken:1").resolve(AMD64)
    assert layout.folder.exists()
    faulty.faults.append(Fault(image.layers[0].digest, cut_at=1000, times=1))
    assert await tree(tmp_path, image) == {"b": "f:2", "d": "d", "w": "d"}


async def test_a_transfer_that_always_breaks(tmp_path: Path, faulty: Proxy, host: str) -> None:
    pushed(tmp_path, host, "a/breaking:1")
    image = await source(tmp_path, f"docker://{faulty.host}/a/breaking:1").resolve(AMD64)
    faulty.faults.append(Fault(image.layers[0].digest, cut_at=1000))
    error = await told(tmp_path, f"docker://{faulty.host}/a/breaking:1")
    assert "the transfer broke off" in error.message and "(tried 3 times)" in error.message


async def test_other_bytes_than_the_digest_says(tmp_path: Path, faulty: Proxy, host: str) -> None:
    pushed(tmp_path, host, "a/altered:1")
    image = await source(tmp_path, f"docker://{faulty.host}/a/altered:1").resolve(AMD64)
    faulty.faults.append(Fault(image.layers[0].digest, body=b"\0" * image.layers[0].size))
    error = await told(tmp_path, f"docker://{faulty.host}/a/altered:1")
    assert "something else than the digest says" in error.message


async def test_more_bytes_than_the_manifest_says(tmp_path: Path, faulty: Proxy, host: str) -> None:
    """The disk is not filled first."""
    pushed(tmp_path, host, "a/endless:1")
    image = await source(tmp_path, f"docker://{faulty.host}/a/endless:1").resolve(AMD64)
    faulty.faults.append(Fault(image.layers[0].digest, body=bytes(16 << 20)))
    error = await told(tmp_path, f"docker://{faulty.host}/a/endless:1")
    assert "more than the manifest says" in error.message


def processes_of(folder: Path) -> list[bytes]:
    """The command lines that name it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((process / "cmdline").read_bytes())
    return [command for command in found if os.fsencode(folder) in command]


@pytest.mark.skipif(os.geteuid() != 0, reason="unpacking a root file system needs root")
async def test_cancelled_in_the_middle_leaves_nothing(tmp_path: Path, faulty: Proxy, host: str) -> None:
    pushed(tmp_path, host, "a/slow:1")
    image = await source(tmp_path, f"docker://{faulty.host}/a/slow:1").resolve(AMD64)
    go_on = threading.Event()
    fault = Fault(image.layers[0].digest, until=go_on)
    faulty.faults.append(fault)
    work = make_image_tree(image, tmp_path / "scratch", tmp_path / "tree", disk_mib=64)
    task = asyncio.create_task(work)
    assert await asyncio.to_thread(fault.reached.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert not (tmp_path / "scratch").exists() and not (tmp_path / "tree").exists()
    assert processes_of(tmp_path) == []


async def test_a_registry_that_is_not_there(tmp_path: Path, user: Path) -> None:
    with proxy("127.0.0.1:9") as gone:
        nobody = gone.host
    write_settings(user, nobody)
    error = await told(tmp_path, f"docker://{nobody}/a/b:1")
    assert f"the registry {nobody} cannot be reached" in error.message


async def test_a_registry_that_speaks_http(tmp_path: Path, host: str) -> None:
    """Not unless the user's settings say so."""
    error = await told(tmp_path, f"docker://{host}/a/b:1")
    assert "speaks HTTP, not HTTPS" in error.message and "registries.conf" in error.fix


async def test_the_login_of_docker_counts(
    tmp_path: Path, user: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("private")
    with registry(place, htpasswd=HTPASSWD) as private:
        write_settings(user, private)
        name = f"docker://{private}/a/b:1"
        assert "without the right login (401)" in (await told(tmp_path, name)).message
        login = base64.b64encode(b"anna:secret").decode()
        (user / ".docker").mkdir()
        (user / ".docker" / "config.json").write_text(json.dumps({"auths": {private: {"auth": login}}}))
        pushed(tmp_path, private, "a/b:1")
        assert (await source(tmp_path, name).resolve(AMD64)).context.env == {"A": "1"}
