"""The calls of ``RemoteStore``: one pool of connections, what may be asked again, and what faults mean."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from aenv_run.credentials import ServerAddress, is_loopback
from aenv_run.errors import AenvError, CorruptData, NodeUnavailable, ProtocolError, StoreUnavailable, from_wire
from aenv_run.later import later
from aenv_run.server_link import CALLS, CONNECT_S, error_of, headers, require_ours
from aenv_run.store.remote_wire import DIGEST_HEADER, WireError

if TYPE_CHECKING:
    import httpx
else:
    httpx = later("httpx")

M = TypeVar("M", bound=BaseModel)
Params = Mapping[str, str | int]
#: A server that copies gigabytes before it answers takes its time.
ANSWER_S = 600.0
#: Between tries of what may be asked again.
PAUSES_S = (0.1, 0.5, 2.0)
#: Of an answer that is a small JSON object, or an error.
MAX_SMALL_BYTES = 64 << 10
#: Less than servers keep a connection on which nothing comes.
KEEP_S = 2.0
MAX_CONNECTIONS = 32


class StoreLink:
    """Thread-safe. ``place`` names the server in errors."""

    def __init__(self, server: ServerAddress, pauses_s: tuple[float, ...] = PAUSES_S) -> None:
        self._server, self._pauses_s = server, pauses_s
        self.place = f"the server at {server.url}"
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None

    def ask(
        self,
        reply: type[M],
        method: str,
        path: str,
        params: Params | None = None,
        content: bytes | Iterator[bytes] | None = None,
        *,
        limit_bytes: int = MAX_SMALL_BYTES,
    ) -> M:
        """The answer as its model."""
        data = self.call(method, path, params, content, limit_bytes=limit_bytes)
        try:
            return reply.model_validate_json(data)
        except ValidationError as error:
            raise ProtocolError(f"{self.place} sent a malformed {reply.__name__}") from error

    def call(
        self,
        method: str,
        path: str,
        params: Params | None = None,
        content: bytes | Iterator[bytes] | None = None,
        *,
        limit_bytes: int = MAX_SMALL_BYTES,
        again: bool = False,
    ) -> bytes:
        """The body of the answer, at most ``limit_bytes``. ``again``: to do it twice is as to do it once."""
        for pause_s in (*self._pauses_s, None):
            try:
                with self._open(method, path, params, content) as response:
                    return self._body(response, limit_bytes)
            except (_NotReached, _BrokeOff) as error:
                if pause_s is None or not (again or method == "GET" or isinstance(error, _NotReached)):
                    raise
            time.sleep(pause_s)
        raise AssertionError("unreachable")

    @contextmanager
    def stream(self, path: str, params: Params) -> Iterator[httpx.Response]:
        """An answer that is read by its user, within ``faults``."""
        for pause_s in (*self._pauses_s, None):
            opening = self._open("GET", path, params, None)
            try:
                response = opening.__enter__()
            except (_NotReached, _BrokeOff):
                if pause_s is None:
                    raise
                time.sleep(pause_s)
                continue
            try:
                yield response
            finally:
                opening.__exit__(None, None, None)
            return

    @contextmanager
    def faults(self, doing: str) -> Iterator[None]:
        """Around what reads an answer."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _NotReached(
                f"{doing}: {self.place} cannot be reached: {error or type(error).__name__}",
                fix="look whether `aenv serve` runs there",
            ) from error
        except httpx.PoolTimeout as error:
            raise _NotReached(
                f"{doing}: all {MAX_CONNECTIONS} connections to {self.place} are in use", fix="do less at once"
            ) from error
        except httpx.TransportError as error:
            raise _BrokeOff(
                f"{doing}: {self.place} went away while it answered ({error or type(error).__name__})",
                fix="try again; whether a write was done is not known",
            ) from error

    def error_in(self, line: bytes) -> AenvError:
        """The error that stands where a line of an answer should be."""
        try:
            found = WireError.model_validate_json(line)
        except ValidationError:
            return ProtocolError(f"{self.place} sent a malformed line")
        return from_wire(found.code, found.message, found.fix)

    @contextmanager
    def _open(
        self, method: str, path: str, params: Params | None, content: bytes | Iterator[bytes] | None
    ) -> Iterator[httpx.Response]:
        more = {DIGEST_HEADER: hashlib.sha256(content).hexdigest()} if isinstance(content, bytes) else {}
        with (
            self.faults(f"{method} {path}"),
            self._http().stream(
                method, f"{CALLS}/store{path}", params=params, content=content, headers=more
            ) as response,
        ):
            require_ours(self._server, response)
            if not response.is_success:
                error = error_of(self._server, response.status_code, self._body(response, MAX_SMALL_BYTES))
                raise StoreUnavailable(error.message, fix=error.fix) if type(error) is NodeUnavailable else error
            yield response

    def _body(self, response: httpx.Response, limit_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        for chunk in response.iter_bytes():
            size += len(chunk)
            if size > limit_bytes:
                raise ProtocolError(f"{self.place} sent more than {limit_bytes} bytes")
            parts.append(chunk)
        data = b"".join(parts)
        said = response.headers.get(DIGEST_HEADER)
        if said is not None and hashlib.sha256(data).hexdigest() != said:
            raise CorruptData(f"what {self.place} sent was damaged on its way: its digest is another")
        return data

    def _http(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                self._client = httpx.Client(
                    base_url=self._server.url,
                    headers=headers(self._server) | {"Accept-Encoding": "identity"},
                    timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
                    trust_env=not is_loopback(self._server.url),
                    verify=self._server.url.startswith("https://"),
                    limits=httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEP_S),
                )
            return self._client


class _NotReached(StoreUnavailable):
    """Nothing was sent."""


class _BrokeOff(StoreUnavailable):
    """It took the request and broke off."""
