"""The dashboard's parts: sessions, the screen of a terminal, the picture of a lineage."""

from __future__ import annotations

import json
import random

import pytest
from starlette.requests import HTTPConnection

from aenv_run.api.ui.lineage import picture
from aenv_run.api.ui.screen import MAX_COLUMNS, MAX_ROWS, Screen
from aenv_run.api.ui.session import LIFE_S, is_own_page, is_valid, make_cookie
from aenv_run.catalog.graph import Graph, Node
from aenv_run.types import SnapshotId

KEY = "k" * 40


def test_a_cookie_is_good_for_its_key_and_its_time() -> None:
    cookie = make_cookie(KEY, 1000.0)
    assert KEY not in cookie and make_cookie(KEY, 1000.0) != cookie
    assert is_valid(cookie, KEY, 1000.0) and is_valid(cookie, KEY, 1000.0 + LIFE_S - 1)
    assert not is_valid(cookie, KEY, 1000.0 + LIFE_S)
    assert not is_valid(cookie, "x" * 40, 1000.0)


@pytest.mark.parametrize("change", ["", ".", "..", "a.b.c", "٣.x.y", "9" * 40 + ".x.y", "1e9.x.y", "é.é.é"])
def test_what_is_no_cookie_of_ours(change: str) -> None:
    assert not is_valid(change, KEY, 0.0)


def test_a_cookie_whose_end_was_moved() -> None:
    end, rest = make_cookie(KEY, 1000.0).split(".", 1)
    assert not is_valid(f"{int(end) + 1}.{rest}", KEY, 1000.0)


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("https://aenv.example", "AENV.example", True),
        ("http://evil.example", "localhost:8000", False),
        ("http://localhost:8000.evil.example", "localhost:8000", False),
        ("null", "localhost:8000", False),
        (None, "localhost:8000", False),
        ("http://", "", False),
    ],
)
def test_which_pages_may_change_something(origin: str | None, host: str, own: bool) -> None:
    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin is not None else [])
    assert is_own_page(HTTPConnection({"type": "http", "headers": headers})) is own


def lines(screen: Screen) -> object:
    return screen.changes()["lines"]


def test_a_screen_sends_what_changed_as_runs_of_one_look() -> None:
    screen = Screen(20, 3)
    assert lines(screen) == {"0": [], "1": [], "2": []}
    screen.feed(b"hi \x1b[1;31mred\x1b[0m \xe4\xb8")
    screen.feed(b"\xad\r\n\x1b[7mrev")
    plain = ["default", "default", ""]
    assert screen.changes() == {
        "lines": {
            "0": [["hi ", *plain], ["red", "red", "default", "bold"], [" 中", *plain]],
            "1": [["rev", "default", "default", "reverse"]],
        },
        "cursor": [3, 1],
        "rows": 3,
        "application_keys": False,
    }
    screen.feed(b"\x1b[?1h\x1b[?25l")
    changed = screen.changes()
    assert (changed["lines"], changed["cursor"], changed["application_keys"]) == ({}, None, True)


def test_a_screen_is_sent_whole_after_another_size_and_never_grows_past_its_bound() -> None:
    screen = Screen(10, 2)
    screen.feed(b"one\r\ntwo")
    screen.changes()
    screen.resize(10**6, 10**6)
    changed = screen.changes()
    assert changed["rows"] == MAX_ROWS and len(changed["lines"]) == MAX_ROWS  # type: ignore[arg-type]
    screen.feed(b"x" * MAX_COLUMNS)
    assert max(len(run[0]) for line in screen.changes()["lines"].values() for run in line) <= MAX_COLUMNS  # type: ignore[attr-defined]


def test_a_screen_survives_whatever_a_guest_writes() -> None:
    chance = random.Random(7)
    screen = Screen(40, 10)
    for _ in range(400):
        screen.feed(
            chance.randbytes(40) + b"\x1b[" + chance.randbytes(4) + b"9" * chance.randrange(12) + b"L\x1b]0;"
        )
    screen.feed(b"\x1bc\x1b\\\x07\x18\x1bcstill here")
    assert "still here" in json.dumps(screen.changes())


def node(letter: str, parent: str | None = None, **more: object) -> Node:
    ids = {"id": SnapshotId(letter * 64), "parent": None if parent is None else SnapshotId(parent * 64)}
    return Node.model_validate({**ids, **more})


def test_a_lineage_goes_from_left_to_right_with_a_row_for_each_leaf() -> None:
    nodes = (
        node("a"),
        node("b", "a"),
        node("c", "b", versions=("x:1",)),
        node("d", "b", problem="damaged"),
        node("e", "0"),
    )
    drawn = picture(Graph(reference="x", nodes=nodes))
    at = {box.id[0]: (box.x, box.y) for box in drawn.boxes}
    assert at["a"][1] == at["b"][1] == at["c"][1] < at["d"][1] < at["e"][1]
    assert at["a"][0] == at["e"][0] < at["b"][0] < at["c"][0] == at["d"][0]
    assert len(drawn.lines) == 3 and len(set(at.values())) == 5
    assert [box.id[0] for box in drawn.boxes if box.is_broken] == ["d"]
    assert all(box.x < drawn.width and box.y < drawn.height for box in drawn.boxes)


def test_a_lineage_of_nothing_is_an_empty_picture() -> None:
    assert picture(Graph(reference="x", nodes=())).boxes == ()
