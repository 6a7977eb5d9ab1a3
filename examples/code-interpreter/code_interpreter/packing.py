"""How a kernel writes its messages."""

from __future__ import annotations

import json

from jupyter_client.jsonutil import json_clean, json_default


def pack(message: object) -> bytes:
    """As JSON in ASCII: half of a surrogate pair, which a cell may print, is no UTF-8, and the kernel stalls."""
    try:
        return json.dumps(message, default=json_default, allow_nan=False).encode()
    except (TypeError, ValueError):  # a value that JSON does not have
        return json.dumps(json_clean(message), default=json_default, allow_nan=False).encode()
