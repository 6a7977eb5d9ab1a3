"""A translated recipe as the text of a file: YAML in which nothing is a template."""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml


class _Dumper(yaml.SafeDumper):
    """Text of several lines in blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def recipe_text(recipe: Mapping[str, object], head: str) -> str:
    """The file, with a comment before it."""
    body = yaml.dump(_literal(dict(recipe)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return "".join(f"# {line}\n" for line in head.splitlines()) + body


def _literal(value: object) -> object:
    """Text of a recipe is a template: what would begin one is written as what it is."""
    if isinstance(value, str):
        return re.sub(r"\{[{%#]", lambda found: f"{{{{ '{found[0]}' }}}}", value)
    if isinstance(value, Mapping):
        return {key: _literal(one) for key, one in value.items()}
    return [_literal(one) for one in value] if isinstance(value, list | tuple) else value
