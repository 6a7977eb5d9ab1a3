"""Layers of pages: the file, newest wins against a plain model, and files that lie."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv_run import memory_layers
from aenv_run.drivers.qemu_ram import DEEP_LAYERS, MAX_LAYERS, RamImage, merged, next_role
from aenv_run.errors import CorruptData, InvalidInput
from aenv_run.memory_files import flatten, merge, whole_of
from aenv_run.memory_layers import HEADER, MAGIC, MAX_RUNS, PAGE, Run, coalesce, finish_layer, read_layer

PAGES = 64
RAM = PAGES * PAGE
numbers = count()


def write_layer(path: Path, pages: dict[int, bytes]) -> None:
    """A layer of single pages, neighbours joined."""
    runs: list[Run] = []
    for page in sorted(pages):
        if runs and runs[-1].end == page * PAGE:
            runs[-1] = Run(runs[-1].offset, runs[-1].length + PAGE)
        else:
            runs.append(Run(page * PAGE, PAGE))
    with path.open("wb") as file:
        file.write(bytes(PAGE))
        for page in sorted(pages):
            file.write(pages[page])
        file.flush()
        finish_layer(file.fileno(), RAM, runs)


def page_of(number: int) -> bytes:
    return struct.pack("<Q", number) * (PAGE // 8)


def make_line(folder: Path, layers: list[set[int]]) -> tuple[Path, list[Path], bytes]:
    """A base, its layers, and what the whole is by the simplest model. No page's content occurs twice."""
    base = folder / "base"
    model = bytearray(b"".join(page_of(next(numbers)) for _ in range(PAGES)))
    base.write_bytes(model)
    paths = []
    for number, pages in enumerate(layers, 1):
        written = {page: page_of(next(numbers)) for page in pages}
        paths.append(folder / f"ram.{number}")
        write_layer(paths[-1], written)
        for page, content in written.items():
            model[page * PAGE : (page + 1) * PAGE] = content
    return base, paths, bytes(model)


def read_whole(base: Path, layers: list[Path]) -> bytes:
    whole = bytearray()
    for piece in whole_of(base, layers):
        assert piece.offset == len(whole)
        with piece.file.open("rb") as file:
            file.seek(piece.file_offset)
            whole += file.read(piece.length)
    return bytes(whole)


LINES = st.lists(st.sets(st.integers(0, PAGES - 1), max_size=PAGES), max_size=6)


@settings(max_examples=150, deadline=None)
@given(LINES)
def test_the_newest_page_wins(layers: list[set[int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        base, paths, model = make_line(Path(name), layers)
        assert read_whole(base, paths) == model
        whole = whole_of(base, paths)
        assert all(
            (one.file, one.file_offset + one.length) != (other.file, other.file_offset)
            for one, other in pairwise(whole)
        )


@settings(max_examples=60, deadline=None)
@given(LINES)
def test_merged_and_flattened_say_the_same(layers: list[set[int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        base, paths, model = make_line(Path(name), layers)
        target, flat = Path(name) / "merged", Path(name) / "flat"
        for _ in merge(base, paths, target):
            pass
        assert read_whole(base, [target]) == model
        flatten(base, paths, flat)
        assert flat.read_bytes() == model
        for path in (target, flat):
            assert path.stat().st_mode & 0o777 == 0o444


@settings(deadline=None)
@given(st.sets(st.integers(0, 5000), max_size=400), st.integers(1, 50))
def test_runs_are_few_and_hold_all_that_was_dirty(pages: set[int], most: int) -> None:
    runs = [Run(page * PAGE, PAGE) for page in sorted(pages)]
    joined = coalesce(runs, most)
    assert len(joined) <= most
    assert all(one.end < other.offset for one, other in pairwise(joined))
    held = {page for run in joined for page in range(run.offset // PAGE, run.end // PAGE)}
    assert held >= pages
    if len(coalesce(runs, 5001)) <= most:  # gaps are filled no further than they must be
        assert joined == coalesce(runs, 5001)


def test_an_empty_layer_changes_nothing(tmp_path: Path) -> None:
    base, paths, model = make_line(tmp_path, [set()])
    assert paths[0].stat().st_size == PAGE
    assert read_whole(base, paths) == model


# --- files that lie ---------------------------------------------------------------------------------------------


def table_of(data: bytearray) -> tuple[int, int]:
    _, _, _, runs, at = HEADER.unpack_from(data)
    return runs, at


def with_header(**changed: object) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        fields = dict(zip(("magic", "version", "ram", "runs", "table"), HEADER.unpack_from(data), strict=True))
        HEADER.pack_into(data, 0, *{**fields, **changed}.values())

    return change


def with_entry(index: int, word: int, value: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        struct.pack_into("<Q", data, table_of(data)[1] + 24 * index + 8 * word, value)

    return change


def with_size(by: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        if by < 0:
            del data[by:]
        else:
            data.extend(bytes(by))

    return change


def with_trailing_byte(data: bytearray) -> None:
    data[HEADER.size] = 1


def swapped(data: bytearray) -> None:
    _, at = table_of(data)
    data[at : at + 48] = data[at + 24 : at + 48] + data[at : at + 24]


HOSTILE = {
    "magic": with_header(magic=b"aenv.rom"),
    "version": with_header(version=2),
    "other RAM": with_header(ram=RAM + PAGE),
    "more runs than entries": with_header(runs=4),
    "fewer runs than entries": with_header(runs=2),
    "endless runs": with_header(runs=1 << 61),
    "runs that wrap around": with_header(runs=(1 << 64) // 24 + 1),
    "table in the pages": with_header(table=2 * PAGE),
    "table outside": with_header(table=1 << 40),
    "not zero after the header": with_trailing_byte,
    "shorter": with_size(-1),
    "longer": with_size(1),
    "a page shorter": with_size(-PAGE),
    "unaligned offset": with_entry(1, 0, 10 * PAGE + 1),
    "unaligned length": with_entry(1, 1, PAGE - 1),
    "no length": with_entry(1, 1, 0),
    "overlap": with_entry(1, 0, PAGE),
    "outside the RAM": with_entry(2, 0, RAM),
    "ends outside the RAM": with_entry(2, 1, RAM),
    "wraps around": with_entry(2, 0, (1 << 64) - PAGE),
    "another run's pages": with_entry(1, 2, PAGE),
    "the header as pages": with_entry(0, 2, 0),
    "pages outside": with_entry(2, 2, 1 << 40),
    "out of order": swapped,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_lies_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ram.1"
    write_layer(path, {1: page_of(1), 2: page_of(2), 10: page_of(3), 20: page_of(4)})
    assert len(read_layer(path, RAM)) == 3
    data = bytearray(path.read_bytes())
    HOSTILE[name](data)
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=f"memory layer {path} is damaged"):
        read_layer(path, RAM)


@settings(deadline=None)
@given(st.binary(max_size=3 * PAGE))
def test_any_bytes_are_refused_or_sound(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "ram.1"
        path.write_bytes(HEADER.pack(MAGIC, 1, RAM, 1, PAGE).ljust(PAGE, b"\0") + data)
        with pytest.raises(CorruptData):
            read_layer(path, RAM)


def test_too_many_runs_and_no_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "ram.1"
    ram_bytes = 4 * MAX_RUNS * PAGE
    runs = [Run(2 * index * PAGE, PAGE) for index in range(MAX_RUNS + 1)]
    with path.open("wb") as file:
        file.truncate(PAGE * (len(runs) + 1))
        finish_layer(file.fileno(), ram_bytes, runs)
    with pytest.raises(CorruptData, match=str(MAX_RUNS + 1)):
        read_layer(path, ram_bytes)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptData, match="shorter than its header"):
        read_layer(tmp_path / "pipe", RAM)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CorruptData, match="cannot be opened"):
        read_layer(tmp_path / "link", RAM)


# --- an image's roles --------------------------------------------------------------------------------------------


@pytest.fixture
def line(tmp_path: Path) -> Iterator[tuple[dict[str, Path], bytes]]:
    base, paths, model = make_line(tmp_path, [{number} for number in range(DEEP_LAYERS + 1)])
    (tmp_path / "device_state").write_text("devices")
    image = {"ram": base, "device_state": tmp_path / "device_state"}
    yield {**image, **{path.name: path for path in paths}}, model


def test_roles_are_a_line_without_a_gap(line: tuple[dict[str, Path], bytes]) -> None:
    memory, _ = line
    image = RamImage.of(memory)
    assert image.roles == ("ram", *(f"ram.{number}" for number in range(1, DEEP_LAYERS + 2)))
    assert next_role(image.roles) == f"ram.{DEEP_LAYERS + 2}"
    for broken in ("ram", "device_state", "ram.2"):
        with pytest.raises(InvalidInput, match=f"missing: .*{broken}"):
            RamImage.of({role: path for role, path in memory.items() if role != broken})
    with pytest.raises(InvalidInput, match=r"not known: ram\.one"):
        RamImage.of({**memory, "ram.one": memory["ram"]})
    assert next_role(()) == "ram"


async def test_deep_lines_are_merged_above_the_same_base(
    line: tuple[dict[str, Path], bytes], tmp_path: Path
) -> None:
    memory, model = line
    target = tmp_path / "merged"
    assert await merged(memory, target, eager=False) is None
    assert DEEP_LAYERS < MAX_LAYERS
    assert not target.exists()
    found = await merged(memory, target, eager=True)
    assert found == {"ram": memory["ram"], "ram.1": target, "device_state": memory["device_state"]}
    assert read_whole(found["ram"], [target]) == model
    assert await merged(found, tmp_path / "again", eager=True) is None


def test_a_merge_that_is_given_up_is_no_layer(tmp_path: Path) -> None:
    base, paths, _ = make_line(tmp_path, [{1}, {5}, {9}])
    target = tmp_path / "merged"
    steps = merge(base, paths, target, PAGE)
    next(steps)
    steps.close()
    with pytest.raises(CorruptData):
        read_layer(target, RAM)


def test_page_size_is_that_of_the_host() -> None:
    assert os.sysconf("SC_PAGE_SIZE") == memory_layers.PAGE
