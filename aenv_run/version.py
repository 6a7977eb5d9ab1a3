"""The version of aenv: of the package, and so of what its processes say to each other."""

from __future__ import annotations

VERSION = "0.1.0"
