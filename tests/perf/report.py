"""What was measured, as tables for people and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table

from tests.perf.footprint import MIB, Memory

#: A host that is busier than this while the bench waits makes figures that cannot be compared.
IDLE_SHARE = 0.1
WIDTH = 100


@dataclass(frozen=True)
class Row:
    """One step: samples in milliseconds, ours and bare. ``note`` is the mark of a note."""

    step: str
    ours_ms: list[float]
    bare_ms: list[float]
    note: str = ""


@dataclass(frozen=True)
class MemoryRow:
    """What one machine of ``count`` holds, ours and bare."""

    state: str
    count: int
    ours: list[Memory]
    bare: list[Memory]


@dataclass
class Report:
    """All of one driver. ``busy``: what share of the host's processors others used, before and after it."""

    facts: dict[str, str]
    notes: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    @property
    def disturbed(self) -> bool:
        """Whether others worked on this machine."""
        return max(self.busy, default=0.0) > IDLE_SHARE


def percentile(samples: list[float], share: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def show(report: Report) -> None:
    """The tables for people: at most 100 columns, what needs words in notes below them."""
    console = Console(highlight=False, width=WIDTH)
    for key, value in report.facts.items():
        console.print(f"{key}: {value}", soft_wrap=True)
    console.print(_times(report.rows))
    if report.memory:
        console.print(_memory(report.memory))
    for mark, text in report.notes.items():
        console.print(f"({mark}) {text}" if len(mark) == 1 else f"{mark}: {text}", soft_wrap=True)
    shares = ", ".join(f"{share:.0%}" for share in report.busy)
    console.print(f"others used {shares} of the processors before and after")
    if report.disturbed:
        console.print("WARNING: this machine was not idle: these figures are not comparable")
    console.print()


def _times(rows: list[Row]) -> Table:
    table = Table(Column("step", no_wrap=True), box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("n", "p50 ms", "p95 ms", "bare p50", "bare p95", "ratio p50"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ours, theirs = statistics.median(row.ours_ms), statistics.median(row.bare_ms)
        cells = [ours, percentile(row.ours_ms, 0.95), theirs, percentile(row.bare_ms, 0.95)]
        step = f"{row.step} ({row.note})" if row.note else row.step
        texts = [f"{ms:.1f}" if ms < 10 else f"{ms:.0f}" for ms in cells]
        table.add_row(step, str(len(row.ours_ms)), *texts, f"{ours / theirs:.2f}" if theirs else "-")
    return table


def _memory(rows: list[MemoryRow]) -> Table:
    table = Table(Column("memory of one child", no_wrap=True), box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("n", "Pss MiB", "held", "group", "bare Pss", "bare held", "bare group"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = []
        for found in (row.ours, row.bare):
            for name in ("pss", "held", "group"):
                median = statistics.median(getattr(one, name) for one in found)
                cells.append(f"{median / MIB:.1f}" if median else "-")
        table.add_row(row.state, str(row.count), *cells)
    return table


def write_json(path: Path, reports: list[Report]) -> None:
    """Every sample."""
    found = [{**asdict(report), "disturbed": report.disturbed} for report in reports]
    path.write_text(json.dumps({"drivers": found}, indent=1))
