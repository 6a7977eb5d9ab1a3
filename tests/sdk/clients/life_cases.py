"""What becomes of a sandbox: pause, resume, fork, snapshot, template, end."""

from __future__ import annotations

import os
from pathlib import Path

from cases import Site, case, got, has, raises
from e2b import (
    BuildException,
    NotFoundException,
    SandboxException,
    SandboxQuery,
    SandboxState,
    TemplateBuildStatus,
)

BEFORE = "kept_over = 'yes'; import random; random.seed(1); random.random()"


@case("sandbox.pause")
async def pause(site: Site) -> None:
    await got(site.sandbox.run_code(BEFORE))
    site.kept["process"] = await got(site.sandbox.commands.run("sleep 602", background=True, timeout=0))
    await got(site.sandbox.pause())
    assert (await got(site.sandbox.get_info())).state == SandboxState.PAUSED
    pages = site.Sandbox.list(query=SandboxQuery(metadata={"run": site.unique}, state=[SandboxState.PAUSED]))
    assert [one.sandbox_id for one in await got(pages.next_items())] == [site.sandbox.sandbox_id]
    await got(site.sandbox.pause())  # once more changes nothing


@case("sandbox.connect: resumes")
async def resume(site: Site) -> None:
    await got(site.sandbox.connect(timeout=600))
    assert (await got(site.sandbox.get_info())).state == SandboxState.RUNNING
    assert site.kept["process"].pid in [one.pid for one in await got(site.sandbox.commands.list())]
    assert await got(site.sandbox.files.read("/home/user/relative")) == "in the home"
    assert await got(site.sandbox.is_running()) is True


@case("run_code after a resume")
async def run_code(site: Site) -> None:
    assert (await got(site.sandbox.run_code("kept_over"))).text == "yes"


@case("auto-resume by a request")
async def auto_resume(site: Site) -> None:
    await got(site.sandbox.pause())
    assert (await got(site.sandbox.commands.run("echo awake"))).stdout == "awake\n"
    assert (await got(site.sandbox.get_info())).state == SandboxState.RUNNING


@case("sandbox.fork")
async def fork(site: Site) -> None:
    has(site.sandbox, "fork")
    (child,) = await got(site.sandbox.fork())
    assert not isinstance(child, Exception), child
    site.to_kill.append(child)
    assert child.sandbox_id != site.sandbox.sandbox_id
    draw = "(kept_over, random.random())"
    theirs, mine = (await got(child.run_code(draw))).text, (await got(site.sandbox.run_code(draw))).text
    assert theirs.startswith("('yes', ") and theirs != mine, (theirs, mine)
    await got(child.files.write("/tmp/child", "child"))
    assert not await got(site.sandbox.files.exists("/tmp/child"))
    assert await got(child.kill()) is True


@case("sandbox.create_snapshot")
async def create_snapshot(site: Site) -> None:
    made = await got(site.sandbox.create_snapshot())
    assert made.snapshot_id
    site.snapshot_id = made.snapshot_id
    assert (await got(site.sandbox.commands.run("echo on"))).stdout == "on\n"


@case("list_snapshots")
async def list_snapshots(site: Site) -> None:
    for pages in (site.Sandbox.list_snapshots(), site.sandbox.list_snapshots()):
        found = []
        while pages.has_next:
            found += [one.snapshot_id for one in await got(pages.next_items())]
        assert site.snapshot_id in found, found


@case("Sandbox.create of a snapshot")
async def create_of_snapshot(site: Site) -> None:
    other = await got(site.Sandbox.create(site.snapshot_id, timeout=300))
    site.to_kill.append(other)
    assert await got(other.files.read("/home/user/relative")) == "in the home"
    assert (await got(other.run_code("kept_over"))).text == "yes"
    assert await got(other.kill()) is True


@case("delete_snapshot")
async def delete_snapshot(site: Site) -> None:
    assert await got(site.Sandbox.delete_snapshot(site.snapshot_id)) is True
    assert await got(site.Sandbox.delete_snapshot(site.snapshot_id)) is False
    await raises(SandboxException, lambda: site.Sandbox.create(site.snapshot_id))


@case("Template.build")
async def build(site: Site) -> None:
    context = Path(os.environ["SDK_CONTEXT"])
    (context / "copied.txt").write_text("copied")
    template = (
        site.Template(file_context_path=str(context))
        .from_template("base")
        .set_envs({"BUILT": "yes"})
        .run_cmd("echo $BUILT >/home/user/ran")
        .copy("copied.txt", "/home/user/copied.txt")
    )
    entries: list[str] = []
    site.build = await got(
        site.Template.build(template, site.unique, on_build_logs=lambda entry: entries.append(entry.message))
    )
    site.template = site.unique
    assert site.build.template_id and site.build.build_id and entries


@case("Template.build that fails")
async def build_fails(site: Site) -> None:
    template = site.Template().from_template("base").run_cmd("echo why >&2; exit 3")
    error = await raises(BuildException, lambda: site.Template.build(template, f"{site.unique}-bad"))
    assert "3" in str(error), error


@case("Template.get_build_status")
async def build_status(site: Site) -> None:
    status = await got(site.Template.get_build_status(site.build))
    assert status.status == TemplateBuildStatus.READY and status.build_id == site.build.build_id


@case("Template.exists, alias_exists")
async def exists(site: Site) -> None:
    assert await got(site.Template.exists(site.template)) is True
    assert await got(site.Template.alias_exists(site.template)) is True
    assert await got(site.Template.exists(f"{site.template}-none")) is False


@case("Template.assign_tags, get_tags, remove_tags")
async def tags(site: Site) -> None:
    made = await got(site.Template.assign_tags(site.template, ["stable", "v1"]))
    assert made.build_id and sorted(made.tags)[-2:] == ["stable", "v1"], made
    assert {"stable", "v1"} <= {one.tag for one in await got(site.Template.get_tags(site.template))}
    await got(site.Template.remove_tags(site.template, ["v1"]))
    assert "v1" not in {one.tag for one in await got(site.Template.get_tags(site.template))}


@case("Sandbox.create of a built template")
async def create_of_template(site: Site) -> None:
    other = await got(site.Sandbox.create(f"{site.template}:stable", timeout=300))
    site.to_kill.append(other)
    assert await got(other.files.read("/home/user/copied.txt")) == "copied"
    assert await got(other.files.read("/home/user/ran")) == "yes\n"
    assert await got(other.kill()) is True


@case("sandbox.kill")
async def kill(site: Site) -> None:
    assert await got(site.sandbox.kill()) is True
    assert await got(site.sandbox.kill()) is False
    assert await got(site.Sandbox.kill(site.sandbox.sandbox_id)) is False
    assert await got(site.sandbox.is_running()) is False
    await raises(NotFoundException, lambda: site.sandbox.get_info())
