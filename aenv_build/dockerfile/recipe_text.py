"""A translated recipe as the text of a file: YAML in which nothing is a template."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from aenv_run.recipe_literal import literal


class _Dumper(yaml.SafeDumper):
    """Text of several lines in blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def recipe_text(recipe: Mapping[str, object], head: str) -> str:
    """The file, with a comment before it."""
    body = yaml.dump(literal(dict(recipe)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return "".join(f"# {line}\n" for line in head.splitlines()) + body
