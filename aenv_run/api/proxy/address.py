"""Whose a request is: a port of a sandbox, or the server's own. Decided from its head alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from aenv_run.errors import InvalidInput
from aenv_run.types import SandboxId

ENVD_PORT = 49983
Headers = Sequence[tuple[bytes, bytes]]
#: How the request was addressed: refusals have other statuses and bodies in each.
Dialect = Literal["e2b", "agentenv"]
#: By what it was led, for the metrics.
Source = Literal["proxy_host", "proxy_header", "proxy_prefix"]

#: Name of the sandbox, name of the port, in order of strength.
PAIRS: tuple[tuple[bytes, bytes, Dialect], ...] = (
    (b"x-agentenv-sandbox-id", b"x-agentenv-target-port", "agentenv"),
    (b"e2b-sandbox-id", b"e2b-sandbox-port", "e2b"),
)
ROUTING_HEADERS = frozenset(name for pair in PAIRS for name in pair[:2])
#: Calls of the control plane, also with routing headers. `/proxy/...` and host names lead into the sandbox.
_CONTROL = re.compile(rb"/(?:v2/)?sandboxes/[^/]+(?:/.*)?", re.DOTALL)
_LABEL = re.compile(r"([0-9]+)-(.*)", re.DOTALL)
_PORT = re.compile(r"[0-9]{1,5}")
_PREFIX = b"/proxy"


@dataclass(frozen=True)
class Target:
    """``path`` (raw, without its query) of ``port`` in a sandbox."""

    sandbox_id: SandboxId
    port: int
    path: bytes
    dialect: Dialect = "e2b"
    source: Source = field(default="proxy_host", compare=False)


@dataclass(frozen=True)
class Misrouted:
    """It names a sandbox, but wrongly: ``message`` says how. The answer is 400."""

    message: str


def target_of(headers: Headers, raw_path: bytes, domains: Iterable[str]) -> Target | Misrouted | None:
    """None: it is the server's own. ``headers`` have names in lower case.

    The host name beats the headers; ``x-agentenv-…`` beats ``e2b-…``.
    """
    by_host = _by_host(_values(headers, b"host"), raw_path, domains)
    if by_host is not None:
        return by_host
    prefixed = raw_path == _PREFIX or raw_path.startswith(_PREFIX + b"/")
    path = (raw_path[len(_PREFIX) :] or b"/") if prefixed else raw_path
    for id_name, port_name, dialect in PAIRS:
        ids, ports = _values(headers, id_name), _values(headers, port_name)
        if not ids and not ports:
            continue
        if not prefixed and _CONTROL.fullmatch(raw_path):
            return None
        if len(ids) != 1 or len(ports) != 1:
            return Misrouted(f"{id_name.decode()} and {port_name.decode()} must be there once each")
        source: Source = "proxy_prefix" if prefixed else "proxy_header"
        return checked(_text(ids[0]), _text(ports[0]), path, dialect, source)
    if prefixed:
        names = " and ".join(name.decode() for name in PAIRS[1][:2])
        return Misrouted(f"/proxy needs the headers {names}, which say whose it is")
    return None


def host_name(value: str) -> str:
    """A ``Host`` without its port and its last dot, in lower case. Of an IPv6 address the brackets stay."""
    host = value.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].removesuffix(".")


def _by_host(values: list[bytes], raw_path: bytes, domains: Iterable[str]) -> Target | Misrouted | None:
    if len(values) > 1:
        return Misrouted("there is more than one Host header")
    host = host_name(_text(values[0])) if values else ""
    for domain in domains:
        label = host.removesuffix("." + domain)
        if label == host or "." in label or not (match := _LABEL.fullmatch(label)):
            continue
        return checked(match[2], match[1], raw_path, "e2b")
    return None


def checked(
    sandbox_id: str, port: str, path: bytes, dialect: Dialect, source: Source = "proxy_host"
) -> Target | Misrouted:
    """The target, if both are what they should be."""
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        return Misrouted(f"{port[:20]!r} is not a port (1 to 65535)")
    try:
        return Target(SandboxId(sandbox_id), int(port), path, dialect, source)
    except InvalidInput as error:
        return Misrouted(error.message)


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for found, value in headers if found == name]


def _text(value: bytes) -> str:
    return value.strip().decode("latin-1")
