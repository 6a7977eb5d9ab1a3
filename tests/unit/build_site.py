"""A home with a base snapshot, and builds of recipes and their cells in it on a pretended engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from aenv_build.commands.cells import BuiltCell, build_cells
from aenv_build.language.load import load_cells
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.plan import Plan, make_plan
from aenv_build.reports.events import BuildEvent
from aenv_build.running.workshop import BuildResult, Workshop
from aenv_run.paths import Home
from aenv_run.repository import Repository
from tests.unit.node_site import Site, make_site
from tests.unit.pretend_build import ARCHITECTURE, workshop
from tests.unit.pretend_engine import FACTS, ZERO, PretendEngine

HEAD = "version: 1\nname: made\nbase: {snapshot: tiny}\n"


@dataclass
class BuildSite:
    """A home with ``tiny:1``. ``told`` are the events of all builds; ``commands`` what guests ran, in order."""

    site: Site
    folder: Path
    told: list[BuildEvent] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path) -> BuildSite:
        return cls(make_site(folder / "home", folder / "seed"), folder)

    @property
    def home(self) -> Home:
        return self.site.home

    @property
    def repository(self) -> Repository:
        return self.site.tools.repository

    @property
    def engine(self) -> PretendEngine:
        return self.site.engine

    @property
    def commands(self) -> list[str]:
        return self.engine.commands

    @property
    def workshop(self) -> Workshop:
        return replace(workshop(self.site, self.told.append), parallel=2)

    def plans(self, text: str, variables: Mapping[str, str] | None = None) -> list[Plan]:
        path = self.folder / "recipe.yaml"
        path.write_text(text)
        base = self.repository.snapshot(self.site.tools.catalog.resolve("tiny").snapshot_id)
        facts = HostFacts(ARCHITECTURE, ZERO, FACTS)
        return [make_plan(source, facts, base) for source in load_cells(path, variables)]

    async def cells(self, text: str, **changed: object) -> tuple[BuiltCell, ...]:
        """Build it; ``changed`` are fields of the workshop."""
        return await build_cells(self.plans(text), replace(self.workshop, **changed))  # type: ignore[arg-type]

    async def build(self, text: str, **changed: object) -> BuildResult:
        """Build a recipe without a matrix."""
        (built,) = await self.cells(text, **changed)
        assert built.result is not None
        return built.result

    def clean(self) -> bool:
        """No machine and no scratch is left."""
        return not self.engine.machines and not list(self.home.staging.iterdir())
