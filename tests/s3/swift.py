"""OpenStack Swift with its S3 API on this host."""

from __future__ import annotations

import os

#: Set by `make soak`, since Swift is 63 packages and takes 10 s to start.
SWIFT = bool(os.environ.get("AENV_SWIFT"))
