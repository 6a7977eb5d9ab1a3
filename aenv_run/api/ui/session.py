"""Who may use the dashboard: a browser that was given the API key once holds a signed cookie for a while."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

COOKIE = "aenv_session"
#: A working day; then the key is asked for again.
LIFE_S = 12 * 3600
_PURPOSE = b"aenv dashboard session\n"


def make_cookie(api_key: str, now_s: float | None = None) -> str:
    """``END.RANDOM.MAC``: valid until END, for this API key alone. The key cannot be had from it."""
    end_s = int((time.time() if now_s is None else now_s) + LIFE_S)
    body = f"{end_s}.{secrets.token_hex(16)}"
    return f"{body}.{_mac(api_key, body)}"


def is_valid(cookie: str, api_key: str, now_s: float | None = None) -> bool:
    """Whether we made it with this key, and it has not ended."""
    body, _, mac = cookie.rpartition(".")
    end_s = body.partition(".")[0]
    if not (end_s.isascii() and end_s.isdigit() and len(end_s) < 12 and mac.isascii()):
        return False
    if not hmac.compare_digest(mac, _mac(api_key, body)):
        return False
    return (time.time() if now_s is None else now_s) < int(end_s)


def _mac(api_key: str, body: str) -> str:
    return hmac.new(api_key.encode(), _PURPOSE + body.encode(), hashlib.sha256).hexdigest()


def is_own_page(connection: HTTPConnection) -> bool:
    """Whether a request that changes something comes from a page of ours. A browser always names the origin."""
    origin = connection.headers.get("origin")
    host = connection.headers.get("host", "")
    return origin is not None and bool(host) and urlsplit(origin).netloc.lower() == host.lower()
