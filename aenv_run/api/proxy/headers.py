"""Which headers go on, which stay here, which are added. Values that go on are not touched, nor is their order."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from aenv_run.api.proxy.address import ENVD_PORT, ROUTING_HEADERS, Headers, Target, host_name

Header = tuple[bytes, bytes]

TRAFFIC_TOKEN = b"e2b-traffic-access-token"
ENVD_TOKEN = b"x-access-token"
CODE_INTERPRETER_PORT = 49999
API_KEY = b"x-api-key"
#: Of one connection alone. `Connection` names more of them in each message.
_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"),
    )
)
#: What `Connection` must not take away: the message would be another one.
_KEPT = frozenset((b"host", b"content-length", b"content-type", ENVD_TOKEN))
#: Who the client is, as a proxy before us says.
_OF_CLIENTS = frozenset((b"x-forwarded-for", b"x-real-ip", b"forwarded"))
_REPLACED = frozenset((b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-method", b"x-forwarded-uri"))
#: What the host name of a service is to it, unless the sandbox says otherwise: development servers serve it.
DEFAULT_MASK = "localhost:${PORT}"


@dataclass(frozen=True)
class Asked:
    """The head of a client's request. ``headers`` have names in lower case; ``peer`` is the client's address."""

    method: bytes
    query: bytes
    headers: Headers
    scheme: str
    peer: str

    def values(self, name: bytes) -> list[bytes]:
        """All of one name."""
        return [value for found, value in self.headers if found == name]

    def first(self, name: bytes) -> bytes | None:
        """The first of one name."""
        return next((value for found, value in self.headers if found == name), None)

    @property
    def public_scheme(self) -> str:
        """What the client's browser sees: a proxy on this host may have ended TLS before us."""
        told = (self.first(b"x-forwarded-proto") or b"").split(b",")[0].strip().lower().decode("latin-1")
        if told in ("http", "https") and _is_loopback(self.peer):
            return told
        return {"ws": "http", "wss": "https"}.get(self.scheme, self.scheme)


@dataclass(frozen=True)
class Mask:
    """A service sees ``inner`` as its host; the client's browser sees ``outer`` (`Host` as it sent it).

    A service compares `Origin` with `Host`, or with `X-Forwarded-Host`. So all three are told as one: an origin
    that is the client's own becomes the service's, and then nothing tells of the outer name.
    """

    scheme: str
    outer: bytes
    inner: bytes

    @classmethod
    def of(cls, target: Target, asked: Asked, template: str | None) -> Mask:
        """``template``: the sandbox's own (`${PORT}`, `${HOST}`), or None."""
        outer = (asked.first(b"host") or b"").strip()
        if target.port == ENVD_PORT:
            return cls(asked.public_scheme, outer, outer or b"localhost")
        inner = (template or DEFAULT_MASK).replace("${PORT}", str(target.port))
        inner = inner.replace("${HOST}", outer.decode("latin-1"))
        return cls(asked.public_scheme, outer, inner.encode("latin-1", "ignore") or b"localhost")

    @property
    def active(self) -> bool:
        """Whether the two differ."""
        return self.outer != self.inner and bool(self.outer)

    def inwards(self, value: bytes) -> bytes:
        """A URL of the client's own origin as one of the service's; any other as it is."""
        start = self.scheme.encode() + b"://" + self.outer
        return b"http://" + self.inner + value[len(start) :] if _is_below(value, start) else value

    def outwards(self, value: bytes) -> bytes:
        """A URL of the service's origin as one of the client's; any other as it is."""
        for scheme in (b"http://", b"https://"):
            if _is_below(value, scheme + self.inner):
                return self.scheme.encode() + b"://" + self.outer + value[len(scheme + self.inner) :]
        return value


def request_headers(
    target: Target, asked: Asked, mask: Mask, *, api_key: bytes, token: str | None
) -> list[Header]:
    """For the service: ``token`` is what opens the daemon's port, None for every other port.

    The code interpreter gets what its caller sends: by it, it asks the daemon for the sandbox's variables.
    """
    connection = _named(asked.headers)
    dropped = _HOP_BY_HOP | ROUTING_HEADERS | _REPLACED | {b"host", TRAFFIC_TOKEN} | connection
    if target.port != CODE_INTERPRETER_PORT:
        dropped |= {ENVD_TOKEN}
    rewritten = False
    kept: list[Header] = [(b"host", mask.inner)]
    for name, value in asked.headers:
        if name in dropped or (name == API_KEY and api_key and value.strip() == api_key):
            continue
        if name in _OF_CLIENTS and not _is_loopback(asked.peer):
            continue  # anybody can write it
        if name in (b"origin", b"referer") and mask.active:
            inner = mask.inwards(value)
            rewritten |= name == b"origin" and inner != value
            value = inner
        kept.append((name, value))
    if token is not None:
        kept.append((ENVD_TOKEN, token.encode()))
    if mask.outer and not rewritten:
        kept.append((b"x-forwarded-host", mask.outer))
    uri = target.path + (b"?" + asked.query if asked.query else b"")
    kept += [
        (b"x-forwarded-proto", mask.scheme.encode()),
        (b"x-forwarded-method", asked.method),
        (b"x-forwarded-uri", uri),
    ]
    if asked.peer:
        kept.append((b"x-forwarded-for", asked.peer.encode()))
    return kept


def response_headers(headers: Headers, mask: Mask, *, status: int) -> list[Header]:
    """For the client."""
    dropped = _HOP_BY_HOP | _named([(name.lower(), value) for name, value in headers])
    if status in (204, 304):
        dropped |= {b"content-length"}  # there is no body that it could be the length of
    kept = [(name.lower(), value) for name, value in headers if name.lower() not in dropped]
    if not mask.active:
        return kept
    moved = (b"location", b"content-location")
    return [(name, mask.outwards(value) if name in moved else value) for name, value in kept]


def _named(headers: Headers) -> frozenset[bytes]:
    """What `Connection` names."""
    values = (value for name, value in headers if name == b"connection")
    return frozenset(part.strip().lower() for value in values for part in value.split(b",")) - _KEPT


def _is_below(value: bytes, start: bytes) -> bool:
    return value.lower().startswith(start.lower()) and value[len(start) : len(start) + 1] in (
        b"",
        b"/",
        b"?",
        b"#",
    )


def _is_loopback(peer: str) -> bool:
    """Also a unix socket, which has no address."""
    if not peer:
        return True
    try:
        return ipaddress.ip_address(host_name(peer) if "." in peer else peer).is_loopback
    except ValueError:
        return False
