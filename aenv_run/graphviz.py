"""Pictures of graphs, drawn by Graphviz where it is installed."""

from __future__ import annotations

from aenv_run import process

TIMEOUT_S = 60.0
MAX_BYTES = 64 << 20


async def svg(dot: str) -> bytes:
    """The SVG of a graph in DOT; ``MissingDependency`` where there is no Graphviz."""
    done = await process.check(
        ["dot", "-Tsvg"],
        what="Graphviz cannot draw the graph",
        fix="apt install graphviz, or use --format dot or mermaid, which need nothing",
        timeout_s=TIMEOUT_S,
        limit_bytes=MAX_BYTES,
        stdin=dot.encode(),
    )
    return done.stdout
