"""Which chunks of all open files were used least recently, and what reading by range has come to."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from aenv_run.blocks.chunk_file import ChunkFile
from aenv_run.cache_limit import PARTIAL

COUNTERS = "counters.json"


@dataclass
class Counters:
    """Since the cache was made, but for the last seconds of a server that was killed.

    Chunks that readers wanted: ``hits`` were here, ``misses`` were fetched, and ``shared`` were neither, since
    somebody was fetching them already. ``failures`` are chunks too.
    """

    hits: int = 0
    misses: int = 0
    shared: int = 0
    read_ahead: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    dropped_bytes: int = 0
    failures: int = 0


def read_counters(cache: Path) -> Counters:
    """What reading by range has come to, of a cache; zeros when there was none."""
    try:
        kept = json.loads((cache / PARTIAL / COUNTERS).read_bytes())
        names = [field.name for field in dataclasses.fields(Counters)]
        return Counters(**{name: int(kept[name]) for name in names})
    except (OSError, ValueError, KeyError, TypeError):
        return Counters()


def save_counters(cache: Path, counters: Counters) -> None:
    """For the next server, and for those who ask. One that cannot be written is lost."""
    path = cache / PARTIAL / COUNTERS
    with suppress(OSError):
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(dataclasses.asdict(counters)))
        temporary.replace(path)


class Budget:
    """The order in which chunks go. Called by one thread."""

    def __init__(self) -> None:
        self._order: OrderedDict[tuple[ChunkFile, int], None] = OrderedDict()

    def add_file(self, file: ChunkFile) -> None:
        """What an earlier life left in it counts as unused."""
        for index in file.stored():
            self._order[file, index] = None
            self._order.move_to_end((file, index), last=False)

    def remove_file(self, file: ChunkFile) -> None:
        """It is closed: a trim takes care of it from now on."""
        for key in [key for key in self._order if key[0] is file]:
            del self._order[key]

    def use(self, file: ChunkFile, index: int) -> None:
        """The chunk was stored or read just now."""
        if file.takes_space(index):
            self._order[file, index] = None
            self._order.move_to_end((file, index))

    def shrink(self, wanted_bytes: int) -> int:
        """Give back at least so much, if there is so much; how much it was."""
        freed_bytes = 0
        with ExitStack() as stack:
            changing: set[ChunkFile] = set()
            while freed_bytes < wanted_bytes and self._order:
                (file, index), _ = self._order.popitem(last=False)
                if file not in changing:
                    stack.enter_context(file.changing())
                    changing.add(file)
                freed_bytes += file.drop(index)
        return freed_bytes
