"""Two homes, as of two nodes, on one repository: a directory, and a bucket. Needs a driver."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_run import Sandbox
from aenv_run.catalog import Catalog
from aenv_run.check import check
from aenv_run.config import open_repository
from aenv_run.errors import Untrusted
from aenv_run.paths import Home
from aenv_run.types import Name, Tag
from tests.e2e.conftest import ROOT, environment, node_home
from tests.e2e.test_build import BUSYBOX, make_base

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a base with its files' owners can only be unpacked by root"),
    pytest.mark.skipif(BUSYBOX is None, reason="the tiny base needs a static busybox"),
]
#: Builds of it have the same result only if they agree on one's.
RECIPE = """
version: 1
name: shared
base: {archive: root.tar}
machine: {memory: 256MiB, disk: 64MiB}
steps:
  - {id: chance, run: '/bin/busybox dd if=/dev/urandom of=/srv/chance bs=64 count=1'}
  - {id: sum, run: '/bin/busybox sha256sum /srv/chance > /srv/sum; /bin/busybox dd if=/dev/urandom of=/m count=1'}
outputs: [{}]
"""
BUILDERS = 8
SOAK = bool(os.environ.get("AENV_CRASH_ROUNDS"))


class Shared:
    """Homes ``one`` and ``two`` on the repository at ``url``, and a recipe."""

    def __init__(self, url: str, one: Home, two: Home, recipe: Path) -> None:
        self.url, self.one, self.two, self.recipe = url, one, two, recipe

    def catalog(self) -> Catalog:
        return Catalog(open_repository(self.url, self.one))

    async def aenv(self, home: Home, module: str, *argv: str) -> str:
        """What it prints; it must succeed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *argv, cwd=ROOT, env={**environment(home), "AENV_REPOSITORY": self.url},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, f"{argv}: {err.decode()}"
        return out.decode()


@pytest.fixture(params=["posix", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Empty at first."""
    folder = tmp_path_factory.mktemp("s")
    make_base(folder / "root.tar")
    (folder / "shared.yaml").write_text(RECIPE)
    url = str(folder / "r")
    if request.param == "s3":
        url = request.getfixturevalue("s3_server").url(folder.name)
    with pytest.MonkeyPatch.context() as patch, node_home(folder) as one, node_home(folder) as two:
        patch.setenv("AENV_REPOSITORY", url)
        yield Shared(url, one, two, folder / "shared.yaml")
    shutil.rmtree(folder)


@pytest.mark.timeout(240)
async def test_eight_builders_publish_one_snapshot(shared: Shared) -> None:
    """As many in each home, of a recipe whose steps write random bytes: all are told of the same version."""
    if "://" in shared.url and not SOAK:
        pytest.skip("a directory is enough each time; the bucket is for make soak")
    homes = [shared.one, shared.two] * (BUILDERS // 2)
    told = await asyncio.gather(
        *(shared.aenv(home, "aenv_build.cli", str(shared.recipe), "--json") for home in homes)
    )
    outputs = [json.loads(out)["outputs"][0] for out in told]
    assert len(outputs) == BUILDERS and len({output["snapshot_id"] for output in outputs}) == 1
    catalog = shared.catalog()
    assert catalog.versions(Name("shared")) == (1,)
    assert catalog.resolve("shared:latest").snapshot_id == outputs[0]["snapshot_id"]
    assert check(catalog.repository, deep=True).ok


@pytest.mark.timeout(240)
@pytest.mark.long("s3")
async def test_built_on_one_and_launched_on_the_other(shared: Shared) -> None:
    await shared.aenv(shared.one, "aenv_build.cli", str(shared.recipe), "--json")
    catalog, name = shared.catalog(), Name("shared")
    first = catalog.resolve("shared:1").snapshot_id
    with await asyncio.to_thread(lambda: Sandbox.create("shared", home=shared.two)) as sandbox:
        await asyncio.to_thread(moves_and_removal, shared, catalog, name, sandbox)
    assert first not in {entry.snapshot_id for entry in catalog.entries()}
    assert check(catalog.repository, deep=True).ok


def only_signed(shared: Shared) -> None:
    """A node that was started before keeps to what its caller requires."""
    key = shared.recipe.with_name("key")
    asyncio.run(shared.aenv(shared.one, "aenv_run.cli", "catalog", "keygen", str(key), "-W"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_REQUIRE_SIGNATURE", f"{key}.pub")
        with pytest.raises(Untrusted):
            Sandbox.create("shared:1", home=shared.two)
        asyncio.run(shared.aenv(shared.one, "aenv_run.cli", "catalog", "sign", "shared:1", "--key", str(key)))
        Sandbox.create("shared:1", home=shared.two).kill()


def moves_and_removal(shared: Shared, catalog: Catalog, name: Name, sandbox: Sandbox) -> None:
    """Tags are moved by both, and what the sandbox is of is removed and collected by the other."""
    assert sandbox.commands.run("cat /srv/sum").stdout.split()[1] == "/srv/chance"
    only_signed(shared)
    made = sandbox.snapshot(name=name)
    assert catalog.versions(name) == (1, 2)

    async def both(*commands: tuple[Home, tuple[str, ...]]) -> None:
        await asyncio.gather(*(shared.aenv(home, "aenv_run.cli", "catalog", *argv) for home, argv in commands))

    asyncio.run(
        both((shared.one, ("promote", "shared:1", "--to", "stable")), (shared.two, ("tag", "shared:1", "seen")))
    )
    asyncio.run(both(*((home, ("promote", "shared:2", "--to", "stable")) for home in (shared.one, shared.two))))
    asyncio.run(both((shared.two, ("rollback", "shared", "stable")), (shared.one, ("tag", "shared:2", "seen"))))
    assert catalog.resolve("shared:stable").version == 1 and catalog.resolve("shared:seen").version == 2
    told = [move.act for move in catalog.tag_log.moves(name, Tag("stable"))]
    assert told == ["rollback", "promote", "promote"], "the second promoter found it done"
    asyncio.run(both((shared.one, ("rm", "shared:1"))))
    asyncio.run(shared.aenv(shared.one, "aenv_run.cli", "gc", "--grace", "0s"))
    assert sandbox.commands.run("cat /srv/sum").exit_code == 0
    with sandbox.fork(1)[0] as child:
        assert child.commands.run("cat /srv/sum").exit_code == 0
    with Sandbox.create(made.snapshot_id, home=shared.two) as again:
        assert again.commands.run("cat /srv/sum").exit_code == 0
