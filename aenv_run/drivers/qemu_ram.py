"""QEMU's RAM: which files it is made of, how QEMU is made to map them, and when there are too many layers.

engine/ram.c is preloaded and does the mapping. Where it was not built, layers are flattened into one file in the
machine's directory, and memory that the guest frees stays with the host's QEMU.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aenv_run import memory_files
from aenv_run.errors import InvalidInput
from aenv_run.memory_layers import Piece
from aenv_run.threads import in_thread

RAM, DEVICE_STATE = "ram", "device_state"
FLAT = "ram.flat"
#: A capture that has more layers is merged at once: each is an open file and a table to read at every start.
MAX_LAYERS = 16
#: More mappings make no machine (the kernel allows 65530, and base pieces lie between these).
MAX_PIECES = 16384
#: Deeper than this, a paused sandbox is merged in the background.
DEEP_LAYERS, DEEP_PIECES = 8, 8192
#: As in engine/ram.c. The path exists nowhere: without the library QEMU does not start.
PRELOADED_PATH = Path("/dev/null/aenv-ram")
PLAN_VARIABLE = "AENV_RAM_PLAN"
PLAN_MAGIC = int.from_bytes(b"RAMPLAN1", "little")


@dataclass(frozen=True)
class RamImage:
    """A machine's RAM when it starts: a base and the layers above it, oldest first.

    ``roles`` are those of the image that it is restored from, in the same order; none for a cold boot, whose base
    is all zeros.
    """

    base: Path
    layers: tuple[Path, ...] = ()
    roles: tuple[str, ...] = ()

    @classmethod
    def of(cls, memory: Mapping[str, Path]) -> RamImage:
        """Of a memory image's files by role; InvalidInput names what is missing or unknown."""
        roles = [RAM, *(layer_role(number) for number in range(1, len(memory) - 1))]
        if missing := sorted({*roles, DEVICE_STATE} - set(memory)):
            unknown = sorted(set(memory) - {*roles, DEVICE_STATE})
            raise InvalidInput(
                f"a restore needs the files ram and device_state, and ram.1, ram.2, ... without a gap; "
                f"missing: {', '.join(missing)}" + (f"; not known: {', '.join(unknown)}" if unknown else "")
            )
        base, *layers = (memory[role].absolute() for role in roles)
        return cls(base, tuple(layers), tuple(roles))


def layer_role(number: int) -> str:
    """The role of the n-th layer above the base, from 1."""
    return f"{RAM}.{number}"


def next_role(roles: Sequence[str]) -> str:
    """The role of what a capture adds to an image of these roles."""
    return layer_role(len(roles)) if roles else RAM


def check_depth(whole: Sequence[Piece], image: RamImage) -> None:
    """InvalidInput when no machine can have that many layers or mappings. No capture leaves such an image."""
    if len(image.layers) > MAX_LAYERS or len(whole) > 2 * MAX_PIECES:
        raise InvalidInput(
            f"the memory above {image.base} has {len(image.layers)} layers in {len(whole)} pieces, "
            f"more than {MAX_LAYERS} in {2 * MAX_PIECES}",
            fix="boot it cold from its disk part",
        )


@dataclass(frozen=True)
class Handover:
    """What QEMU is given so that it maps its RAM: a path, and descriptors and variables that go with it."""

    path: Path
    preloaded: bool
    descriptors: tuple[int, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


@contextmanager
def handed_over(preload: Path | None, image: RamImage, whole: Sequence[Piece]) -> Iterator[Handover]:
    """Valid until QEMU is spawned, which inherits the descriptors."""
    if preload is None:
        yield Handover(image.base, preloaded=False)
        return
    with ExitStack() as opened:
        paths = (preload, image.base, *image.layers)
        files = [opened.enter_context(path.open("rb")).fileno() for path in paths]
        base, *layers = files[1:]
        plan = os.memfd_create("aenv-ram-plan")
        opened.callback(os.close, plan)
        words = _plan(base, layers, image, whole)
        with os.fdopen(os.dup(plan), "wb") as writer:
            writer.write(struct.pack(f"={len(words)}Q", *words))
        # By descriptor: the loader takes a space or a colon in a path for the end of it.
        variables = {
            "LD_PRELOAD": " ".join(filter(None, (f"/proc/self/fd/{files[0]}", os.environ.get("LD_PRELOAD")))),
            PLAN_VARIABLE: str(plan),
        }
        yield Handover(PRELOADED_PATH, True, (*files, plan), {**os.environ, **variables})


def _plan(base: int, layers: Sequence[int], image: RamImage, whole: Sequence[Piece]) -> list[int]:
    """The words that engine/ram.c reads."""
    pieces = [piece for piece in whole if piece.file != image.base]
    index = {path: number for number, path in enumerate(image.layers)}
    ram_bytes = whole[-1].offset + whole[-1].length
    words = [PLAN_MAGIC, ram_bytes, base, len(layers), len(pieces), *layers]
    for piece in pieces:
        words += (piece.offset, piece.length, index[piece.file], piece.file_offset)
    return words


async def merged(memory: Mapping[str, Path], target: Path, *, eager: bool) -> dict[str, Path] | None:
    """See ``protocol.Driver.merge_memory``."""
    image = RamImage.of(memory)
    layers, pieces = (DEEP_LAYERS, DEEP_PIECES) if eager else (MAX_LAYERS, MAX_PIECES)
    if len(image.layers) <= 1:
        return None
    if len(image.layers) <= layers:
        whole = await in_thread(memory_files.whole_of, image.base, image.layers)
        if sum(piece.file != image.base for piece in whole) <= pieces:
            return None
    steps = memory_files.merge(image.base, image.layers, target)
    try:
        while await in_thread(next, steps, StopIteration) is not StopIteration:
            pass  # a cancel arrives between two steps
    except BaseException:
        steps.close()
        target.unlink(missing_ok=True)
        raise
    return {RAM: image.base, layer_role(1): target, DEVICE_STATE: memory[DEVICE_STATE]}
