"""A guest's account of its disk is not trusted: what is refused, and that no name of it becomes a host's."""

from __future__ import annotations

import base64
import io
import json
import stat
import struct
from pathlib import Path

import pytest

from aenv_run.disk_pack import Script, read
from aenv_run.erofs import Node
from aenv_run.errors import AenvError, NoSpace, ProtocolError, Unsupported
from aenv_run.ext4 import Inode

DIRECTORY, FILE, LINK, DEVICE = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777, stat.S_IFCHR
LIMIT = 1 << 20


def line(path: bytes, mode: int = FILE, **other: object) -> bytes:
    told = {"path": _text(path), "mode": mode, "uid": 0, "gid": 0, "mtime": [1, 2], **other}
    return json.dumps(told).encode() + b"\n"


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def chunks(*pieces: tuple[int, bytes]) -> bytes:
    return b"".join(struct.pack("<QI", at, len(data)) + data for at, data in pieces) + bytes(12)


def script(told: bytes, directory: Path, base: Node | None = None) -> str:
    contents = directory / "contents"
    contents.mkdir(exist_ok=True)
    root = read(io.BytesIO(told), contents, LIMIT)
    base = base or node(DIRECTORY)
    return Script({130: node(FILE)}, contents).make(root, base)


def node(mode: int, **children: Node) -> Node:
    inode = Inode(2, mode, 0, 0, 0, 1, 2, 1, (0, 0), 0, b"")
    return Node(inode, {name.encode(): child for name, child in children.items()})


ROOT = line(b"", DIRECTORY)
END = b"\n"


def test_a_small_tree(tmp_path: Path) -> None:
    told = (
        ROOT
        + line(b"d", DIRECTORY)
        + line(b"d/f", size=5)
        + chunks((3, b"ab"))
        + line(b"l", LINK, target=_text(b"d/f"))
    )
    commands = script(told + END, tmp_path).splitlines()
    assert 'mkdir "d"' in commands and 'symlink "l" "d/f"' in commands
    (written,) = [one for one in commands if one.startswith("write ")]
    assert Path(written.split('"')[1]).read_bytes() == b"\0\0\0ab"
    assert {path.name for path in (tmp_path / "contents").iterdir()} == {"3"}


def test_what_is_gone_is_removed_and_what_is_covered_stays(tmp_path: Path) -> None:
    base = node(DIRECTORY, gone=node(DIRECTORY, file=node(FILE)), run=node(DIRECTORY, x=node(FILE)))
    commands = script(ROOT + line(b"run", DIRECTORY, mount=True) + END, tmp_path, base).splitlines()
    assert commands[:4] == ['cd "./gone"', 'rm "./file"', "cd ..", 'rmdir "./gone"']
    assert not any("run" in one for one in commands)


@pytest.mark.parametrize(
    "told",
    [
        b"",
        END,
        b"no json\n",
        line(b"x", DIRECTORY) + END,
        ROOT + ROOT + END,
        ROOT,
        ROOT + line(b"../x") + END,
        ROOT + line(b"..", DIRECTORY) + END,
        ROOT + line(b".", DIRECTORY) + END,
        ROOT + line(b"/x", DIRECTORY) + END,
        ROOT + line(b"d/x") + END,
        ROOT + line(b"d", DIRECTORY) + line(b"d/", DIRECTORY) + END,
        ROOT + line(b"d", DIRECTORY) + line(b"d", DIRECTORY) + END,
        ROOT + line(b"f", size=1) + chunks() + line(b"f/x", DIRECTORY) + END,
        ROOT + line(b"n" * 256, DIRECTORY) + END,
        ROOT + line(b"zero\0", DIRECTORY) + END,
        ROOT + line(b"s", stat.S_IFSOCK) + END,
        ROOT + line(b"f", size=-1) + END,
        ROOT + line(b"f", size=1 << 50) + END,
        ROOT + line(b"f", other=1) + END,
        ROOT + line(b"f", size=4) + chunks((2, b"abc")) + END,
        ROOT + line(b"f", size=4) + struct.pack("<QI", 0, 1 << 30) + END,
        ROOT + line(b"f", size=4) + struct.pack("<QI", 0, 4) + b"ab",
        ROOT + line(b"f", same=130) + END,
        ROOT + line(b"d", DIRECTORY, whole=True) + END,
        ROOT + line(b"c", DEVICE, device=[1 << 12, 0]) + END,
        ROOT + line(b"d", DIRECTORY, xattrs={"system.posix_acl_access": _text(b"x")}) + END,
        ROOT + line(b"d", DIRECTORY, xattrs={"user.\ud800": _text(b"x")}) + END,
        ROOT + b"{" + b" " * (1 << 19) + END,
    ],
)
def test_what_a_guest_may_not_tell(told: bytes, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError):
        script(told, tmp_path)


def test_limits_have_their_own_errors(tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match="do not fit"):
        script(ROOT + line(b"f", size=2 * LIMIT) + chunks((0, b"x" * LIMIT), (LIMIT, b"x")) + END, tmp_path)
    with pytest.raises(Unsupported, match="line break"):
        script(ROOT + line(b"a\nrm x", DIRECTORY) + END, tmp_path)
    with pytest.raises(Unsupported, match="line break"):
        script(ROOT + line(b"l", LINK, target=_text(b"a\rb")) + END, tmp_path)
    deep = b"".join(line(b"/".join([b"d"] * depth), DIRECTORY) for depth in range(1, 600))
    with pytest.raises(AenvError, match="deep"):
        script(ROOT + deep + END, tmp_path)


def test_no_name_is_read_as_a_command(tmp_path: Path) -> None:
    for name in (b'"', b'" rm x "', b"<2>", b"#x", b"-f", b"a b", b"\xff\xfe"):
        commands = script(ROOT + line(name, DIRECTORY) + END, tmp_path)
        lines = [one for one in commands.splitlines() if not one.startswith(("sif ", "cd "))]
        quoted = name.decode(errors="surrogateescape").replace('"', '""')
        assert lines == [f'mkdir "{quoted}"']
