"""What is generated from the code is as the code says."""

from __future__ import annotations

import json

import pytest

from scripts import gen_errors, gen_schemas


def test_schemas_are_up_to_date() -> None:
    assert not gen_schemas.outdated(gen_schemas.CHECKOUT / "schemas"), "run: python -m scripts.gen_schemas"


def test_no_schema_file_is_without_a_model() -> None:
    files = {path.name for path in (gen_schemas.CHECKOUT / "schemas").glob("*.json")}
    assert files == {name for name, _, _ in gen_schemas.SCHEMAS}


@pytest.mark.parametrize("name", [name for name, _, _ in gen_schemas.SCHEMAS])
def test_schemas_refuse_unknown_keys(name: str) -> None:
    schema = json.loads((gen_schemas.CHECKOUT / "schemas" / name).read_text())
    parts = [schema, *schema.get("$defs", {}).values()]
    objects = [part for part in parts if "properties" in part]
    assert objects and all(part["additionalProperties"] is False for part in objects)


def test_errors_are_up_to_date() -> None:
    assert gen_errors.TARGET.read_text() == gen_errors.rendered(), "run: python -m scripts.gen_errors"


def test_every_error_is_documented_and_codes_are_unique() -> None:
    classes = gen_errors.documented()
    assert all(cls.__doc__ for cls in classes)
    codes = [cls.code for cls in classes]
    assert len(set(codes)) == len(codes)
