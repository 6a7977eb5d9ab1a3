"""The steps of a recipe and what each needs: checked for unknown names, double ids and circles."""

from __future__ import annotations

import networkx as nx

from aenv_build.language.document import Where, nearest
from aenv_build.language.load import Source
from aenv_build.language.recipe import Step
from aenv_build.language.verbs import FromStep
from aenv_build.planning.lent import Lent


class Graph:
    """Who needs whom."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.steps: dict[str, tuple[int, Step]] = {}
        for index, step in enumerate(source.recipe.steps):
            if step.id in self.steps:
                first = source.document.mark(("steps", self.steps[step.id][0]))
                raise source.error(("steps", index, "id"), f"the id {step.id!r} is taken by the step at {first}")
            self.steps[step.id] = (index, step)
        self.needs = {step_id: self._needs(index, step) for step_id, (index, step) in self.steps.items()}
        self.order = self._sorted()

    def _needs(self, index: int, step: Step) -> tuple[str, ...]:
        """What the recipe says, or the state before it in the list; a base stands on nothing."""
        if step.base is not None:
            return ()
        if step.needs is None:
            before = [other for other in self.source.recipe.steps[:index] if other.verb != "verify"]
            return (before[-1].id,) if before else ()
        for position, need in enumerate(step.needs):
            self.check(need, ("steps", index, "needs", position))
        return step.needs

    def check(self, step_id: str, where: Where) -> None:
        """The step must exist."""
        if step_id not in self.steps:
            raise self.source.error(where, f"no step has the id {step_id!r}; {nearest(step_id, self.steps)}")

    def _copied_from(self, step: Step) -> tuple[str, ...]:
        if step.copy_ is None or not isinstance(step.copy_.from_, FromStep):
            return ()
        self.check(step.copy_.from_.step, ("steps", self.steps[step.id][0], "copy", "from", "step"))
        return (step.copy_.from_.step,)

    def _sorted(self) -> list[str]:
        """Each after all that it needs; of those that could be next, the first of the recipe."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self.steps)
        for step_id, (_, step) in self.steps.items():
            graph.add_edges_from((need, step_id) for need in (*self.needs[step_id], *self._copied_from(step)))
        self._refuse_cycles(graph)
        return list(nx.lexicographical_topological_sort(graph, key=lambda step_id: self.steps[step_id][0]))

    def _refuse_cycles(self, graph: nx.DiGraph[str]) -> None:
        try:
            edges = nx.find_cycle(graph)
        except nx.NetworkXNoCycle:
            return
        members = [edge[0] for edge in edges]
        first = min(members, key=lambda member: self.steps[member][0])
        start = members.index(first)
        # An edge runs from what is needed; people read "a needs b".
        ring = [first, *reversed(members[start + 1 :] + members[:start]), first]
        where = ("steps", self.steps[first][0], "needs")
        raise self.source.error(where, f"the steps need each other in a circle: {' needs '.join(ring)}")

    def parent(self, step_id: str) -> str | None:
        """The state parent: the first need that keeps a state; a verify keeps none, so its own parent counts."""
        needs = self.needs[step_id]
        states = [need for need in needs if self.steps[need][1].verb != "verify"]
        if states:
            return states[0]
        return self.parent(needs[0]) if needs else None

    def waits(self, step_id: str, parent: str | None) -> tuple[str, ...]:
        """All else that must be done before."""
        _, step = self.steps[step_id]
        return tuple(dict.fromkeys(n for n in (*self.needs[step_id], *self._copied_from(step)) if n != parent))


def check_graph(source: Source) -> None:
    """What can be said of the steps without reading what they copy."""
    Graph(source)


def check_network(source: Source, lent: Lent) -> None:
    """A step that fetches needs the internet, or an index that the builder lends it."""
    if source.recipe.machine.internet:
        return
    for index, step in enumerate(source.recipe.steps):
        own_index = step.pip is not None and step.pip.index is not None
        fetches = "packages" if step.verb in {"apt", "pip"} else "a repository"
        if step.verb in {"apt", "pip"} and (own_index or not lent.serves(step.verb)):
            fix = "say 'machine: {internet: true}', or build with an index of your own (AENV_BUILD_*)"
        elif step.git is not None and step.git.is_remote:
            fix = "say 'machine: {internet: true}', or copy a repository into the sandbox and name its path"
        else:
            continue
        message = f"{step.verb} fetches {fetches}, and this recipe's machines have no internet"
        raise source.document.error(("steps", index, step.verb), message, fix=fix, key=True)
