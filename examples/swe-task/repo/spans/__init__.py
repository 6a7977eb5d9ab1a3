"""Which bytes of a file are here already, and which requests fetch the rest."""

from spans.plan import Download
from spans.span import Span
from spans.spanset import SpanSet

__all__ = ["Download", "Span", "SpanSet"]
