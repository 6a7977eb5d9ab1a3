"""Builds on the pretended engine: the real plan, scheduler and repository, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aenv_build.language.load import load
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.plan import Plan, make_plan
from aenv_build.reports import events
from aenv_build.running.execute import build
from aenv_build.running.workshop import BuildResult, Workshop
from aenv_run.types import Architecture
from tests.unit.node_site import Site
from tests.unit.pretend_engine import FACTS, ZERO

ARCHITECTURE = Architecture("amd64")


def plan_of(site: Site, recipe: Path) -> Plan:
    """The plan of a recipe whose base is the site's snapshot, ``{snapshot: tiny}``."""
    base = site.tools.repository.snapshot(site.tools.catalog.resolve("tiny").snapshot_id)
    return make_plan(load(recipe), HostFacts(ARCHITECTURE, ZERO, FACTS), base)


def workshop(site: Site, *sinks: events.Sink) -> Workshop:
    """On the site's engine; each event goes to each sink."""

    def tell(event: events.BuildEvent) -> None:
        for sink in sinks:
            sink(event)

    return Workshop(
        home=site.home,
        repository=site.tools.repository,
        driver=site.engine,
        architecture=ARCHITECTURE,
        sink=tell,
        why_driver="pretended",
        guests=lambda endpoint: site.engine.guest(endpoint, None),
    )


async def pretend_build(site: Site, recipe: Path, sinks: Sequence[events.Sink] = ()) -> BuildResult:
    """Build it; a command exits as ``site.engine.outcomes`` says."""
    return await build(plan_of(site, recipe), workshop(site, *sinks))
