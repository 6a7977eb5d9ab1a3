"""Values of others in a recipe that a program writes."""

from __future__ import annotations

import re
from collections.abc import Mapping


def literal(value: object) -> object:
    """Text of a recipe is a template: what would begin one is written as what it is.

    A template's own carriage returns are read as ends of lines, so in one they are written out too.
    """
    if isinstance(value, str) and re.search(r"\{[{%#]", value):
        found = re.sub(r"\{[{%#]", lambda found: f"{{{{ '{found[0]}' }}}}", value)
        return found.replace("\r", "{{ '\\r' }}")
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: literal(one) for key, one in value.items()}
    return [literal(one) for one in value] if isinstance(value, list | tuple) else value
