"""The daemon's messages in protobuf, written from the protocol's field numbers and not from the daemon's source.

Values on this side are those of the JSON mapping, so that one test case speaks both: bytes are base64, enums are
names, 64-bit numbers are text. A field without presence that is not on the wire has its default.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

Json = dict[str, Any]

#: field -> (number, type); "?" has presence, "*" is repeated, a capital is a message.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Empty": {},
    "Config": {"cmd": (1, "string"), "args": (2, "string*"), "envs": (3, "map"), "cwd": (4, "string?")},
    "Size": {"cols": (1, "uint32"), "rows": (2, "uint32")},
    "Pty": {"size": (1, "Size?")},
    "Selector": {"pid": (1, "uint32?"), "tag": (2, "string?")},
    "Input": {"stdin": (1, "bytes?"), "pty": (2, "bytes?")},
    "Start": {"process": (1, "Config?"), "pty": (2, "Pty?"), "tag": (3, "string?"), "stdin": (4, "bool?")},
    "Select": {"process": (1, "Selector?")},
    "Update": {"process": (1, "Selector?"), "pty": (2, "Pty?")},
    "SendInput": {"process": (1, "Selector?"), "input": (2, "Input?")},
    "InputData": {"input": (2, "Input?")},
    "StreamInput": {"start": (1, "Select?"), "data": (2, "InputData?"), "keepalive": (3, "Empty?")},
    "SendSignal": {"process": (1, "Selector?"), "signal": (2, "signal")},
    "Process": {"config": (1, "Config?"), "pid": (2, "uint32"), "tag": (3, "string?")},
    "Processes": {"processes": (1, "Process*")},
    "Started": {"pid": (1, "uint32")},
    "Data": {"stdout": (1, "bytes?"), "stderr": (2, "bytes?"), "pty": (3, "bytes?")},
    "End": {"exitCode": (1, "sint32"), "exited": (2, "bool"), "status": (3, "string"), "error": (4, "string?")},
    "Event": {"start": (1, "Started?"), "data": (2, "Data?"), "end": (3, "End?"), "keepalive": (4, "Empty?")},
    "Events": {"event": (1, "Event?")},
    "Path": {"path": (1, "string")},
    "List": {"path": (1, "string"), "depth": (2, "uint32")},
    "Move": {"source": (1, "string"), "destination": (2, "string")},
    "Entry": {
        "name": (1, "string"),
        "type": (2, "file"),
        "path": (3, "string"),
        "size": (4, "int64"),
        "mode": (5, "uint32"),
        "permissions": (6, "string"),
        "owner": (7, "string"),
        "group": (8, "string"),
        "modifiedTime": (9, "Timestamp?"),
        "symlinkTarget": (10, "string?"),
        "metadata": (11, "map"),
        "isSymlink": (12, "bool"),
    },
    "Timestamp": {"seconds": (1, "uint32"), "nanos": (2, "uint32")},
    "OneEntry": {"entry": (1, "Entry?")},
    "Entries": {"entries": (1, "Entry*")},
    "Watch": {
        "path": (1, "string"),
        "recursive": (2, "bool"),
        "includeEntry": (3, "bool"),
        "allowNetworkMounts": (4, "bool"),
    },
    "Change": {"name": (1, "string"), "type": (2, "change"), "entry": (3, "Entry?")},
    "Changes": {"start": (1, "Empty?"), "filesystem": (2, "Change?"), "keepalive": (3, "Empty?")},
    "Watcher": {"watcherId": (1, "string")},
    "WatcherEvents": {"events": (1, "Change*")},
}
METHODS = {
    "process.Process/List": ("Empty", "Processes"),
    "process.Process/Start": ("Start", "Events"),
    "process.Process/Connect": ("Select", "Events"),
    "process.Process/Update": ("Update", "Empty"),
    "process.Process/StreamInput": ("StreamInput", "Empty"),
    "process.Process/SendInput": ("SendInput", "Empty"),
    "process.Process/SendSignal": ("SendSignal", "Empty"),
    "process.Process/CloseStdin": ("Select", "Empty"),
    "filesystem.Filesystem/Stat": ("Path", "OneEntry"),
    "filesystem.Filesystem/MakeDir": ("Path", "OneEntry"),
    "filesystem.Filesystem/Move": ("Move", "OneEntry"),
    "filesystem.Filesystem/ListDir": ("List", "Entries"),
    "filesystem.Filesystem/Remove": ("Path", "Empty"),
    "filesystem.Filesystem/WatchDir": ("Watch", "Changes"),
    "filesystem.Filesystem/CreateWatcher": ("Watch", "Watcher"),
    "filesystem.Filesystem/GetWatcherEvents": ("Watcher", "WatcherEvents"),
    "filesystem.Filesystem/RemoveWatcher": ("Watcher", "Empty"),
}
ENUMS = {
    "signal": {"SIGNAL_UNSPECIFIED": 0, "SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9},
    "file": {f"FILE_TYPE_{name}": n for n, name in enumerate(("UNSPECIFIED", "FILE", "DIRECTORY", "SYMLINK"))},
    "change": {
        f"EVENT_TYPE_{name}": n
        for n, name in enumerate(("UNSPECIFIED", "CREATE", "WRITE", "REMOVE", "RENAME", "CHMOD"))
    },
}
DEFAULTS: dict[str, Any] = {"string": "", "bool": False, "uint32": 0, "sint32": 0, "int64": "0"}


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def encode(name: str, message: Json) -> bytes:
    """A message from its JSON form; fields that it does not have are left out."""
    out = b""
    for field, (number, kind) in MESSAGES[name].items():
        if field not in message:
            continue
        value, base = message[field], kind.rstrip("?*")
        if base == "map":
            for pair in value.items():
                out += field_of(number, b"".join(field_of(i + 1, text.encode()) for i, text in enumerate(pair)))
            continue
        for item in value if kind.endswith("*") else [value]:
            out += field_of(number, wire_value(base, item))
    return out


def field_of(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def wire_value(kind: str, value: Any) -> int | bytes:
    if kind in MESSAGES:
        return encode(kind, value)
    if kind in ENUMS:
        return ENUMS[kind][value] if isinstance(value, str) else int(value)
    if kind == "string":
        return str(value).encode()
    if kind == "bytes":
        return base64.b64decode(value)
    return int(value)


def fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Every field on the wire; only the two wire types that the protocol uses."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 0x80:
                return value, at

    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        key, at = number(at)
        value, at = number(at)
        if key & 7 == 2:
            assert at + value <= len(data)
            found.append((key >> 3, data[at : at + value]))
            at += value
        else:
            assert key & 7 == 0, f"wire type {key & 7}"
            found.append((key >> 3, value))
    return found


def decode(name: str, data: bytes) -> Json:
    """The JSON form of a message. A field that the table does not have is an error of the daemon."""
    table = {number: (field, kind) for field, (number, kind) in MESSAGES[name].items()}
    message: Json = {}
    for field, kind in table.values():
        if not kind.endswith("?"):
            message[field] = [] if kind.endswith("*") else {} if kind == "map" else default(kind)
    for number, value in fields(data):
        field, kind = table[number]
        base = kind.rstrip("?*")
        if base == "map":
            assert isinstance(value, bytes)
            pair = dict(fields(value))
            message[field][text(pair.get(1, b""))] = text(pair.get(2, b""))
        elif kind.endswith("*"):
            message[field].append(json_value(base, value))
        else:
            message[field] = json_value(base, value)
    return message


def text(value: int | bytes) -> str:
    assert isinstance(value, bytes)
    return value.decode()


def default(kind: str) -> Any:
    return next(iter(ENUMS[kind])) if kind in ENUMS else DEFAULTS[kind]


def json_value(kind: str, value: int | bytes) -> Any:
    if isinstance(value, bytes):
        if kind == "Timestamp":
            at = decode("Timestamp", value)
            moment = datetime.fromtimestamp(at["seconds"], UTC) + timedelta(microseconds=at["nanos"] // 1000)
            return moment.isoformat().replace("+00:00", "Z")
        if kind in MESSAGES:
            return decode(kind, value)
        return base64.b64encode(value).decode() if kind == "bytes" else value.decode()
    if kind in ENUMS:
        return {n: name for name, n in ENUMS[kind].items()}[value]
    if kind == "sint32":
        return value >> 1 ^ -(value & 1)
    if kind == "bool":
        return bool(value)
    return str(value) if kind == "int64" else value
