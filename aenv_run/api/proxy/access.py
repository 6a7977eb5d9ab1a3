"""Who may use a port: tokens are compared here, before a byte goes to the sandbox.

The daemon compares its own as well. But while a sandbox is captured the daemon has none, for its copies must not
know it; a request that came in at that moment would be let in by it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import posixpath
import re
import time
from urllib.parse import parse_qs, unquote_to_bytes

from aenv_run.api.proxy import refusals
from aenv_run.api.proxy.address import ENVD_PORT, Target
from aenv_run.api.proxy.headers import ENVD_TOKEN, TRAFFIC_TOKEN, Asked
from aenv_run.api.proxy.places import Door

#: Calls that give a machine its identity or take it away.
_OF_THE_NODE = frozenset((b"/init", b"/aenv/detach", b"/aenv/settle"))
_DIGITS = re.compile(r"[0-9]{1,20}")
_READS, _WRITES = frozenset((b"GET", b"HEAD")), frozenset((b"POST",))


def admit(target: Target, asked: Asked, door: Door) -> str | None:
    """The token that the request takes to the daemon, None for a service. ``Refused``."""
    if target.port != ENVD_PORT:
        if door.traffic_token is not None:
            given = asked.values(TRAFFIC_TOKEN)
            if len(given) != 1 or not _same(given[0], door.traffic_token):
                raise refusals.traffic_token(target)
        return None
    path = posixpath.normpath(b"/" + unquote_to_bytes(target.path).lstrip(b"/"))
    if path in _OF_THE_NODE:
        raise refusals.private_call(target)
    if not door.secure or door.access_token is None:
        return door.access_token
    given = asked.values(ENVD_TOKEN)
    if len(given) > 1:
        raise refusals.envd_token(target, "the header x-access-token is there more than once")
    if given:
        if not _same(given[0], door.access_token):
            raise refusals.envd_token(target, "another one is right")
        return door.access_token
    if path == b"/health" and asked.method in _READS:
        return None
    if asked.method == b"OPTIONS" and asked.first(b"access-control-request-method") is not None:
        return None
    if path == b"/files":
        _check_signature(target, asked, door.access_token)
        return None
    raise refusals.envd_token(target, "the header x-access-token is not there")


def _check_signature(target: Target, asked: Asked, token: str) -> None:
    """The daemon compares it again, with all its reasons: this is what holds while it has no token."""
    try:
        query = parse_qs(asked.query.decode("latin-1"), keep_blank_values=True, max_num_fields=100)
    except ValueError:
        raise refusals.envd_token(target, "the query has too many fields") from None
    first = {name: values[0] for name, values in query.items()}
    if "signature" not in first:
        raise refusals.envd_token(target, "neither the header x-access-token nor a signature is there")
    operation = "read" if asked.method in _READS else "write" if asked.method in _WRITES else ""
    parts = [first.get("path", ""), operation, first.get("username", ""), token]
    expiration = first.get("signature_expiration")
    if expiration is not None:
        parts.append(expiration)
        if not _DIGITS.fullmatch(expiration) or int(expiration) < time.time():
            raise refusals.envd_token(target, "the signature has expired")
    digest = hashlib.sha256(":".join(parts).encode("utf-8", "surrogateescape")).digest()
    right = "v1_" + base64.b64encode(digest).decode().rstrip("=")
    if not _same(first["signature"].encode("utf-8", "replace"), right):
        raise refusals.envd_token(target, "the signature is invalid")


def _same(given: bytes, right: str) -> bool:
    return hmac.compare_digest(given.strip(), right.encode())
