"""An answer of a service as its bytes come in: HTTP/1.0 and 1.1, strictly."""

from __future__ import annotations

import httptools

#: Of the head of an answer, of its trailers, and of whatever else is no body.
MAX_HEAD_BYTES = 256 << 10
_NO_BODY = frozenset((204, 304))


class NoHttp(Exception):
    """The service does not speak HTTP, or breaks off in the middle of an answer."""


class Answer:
    """Fed with bytes; ``body`` collects what is to be passed on, ``over`` says that nothing follows.

    With ``upgrade`` a 101 is an answer, and all of it; feed no more than its head then.
    ``go_on``: the service said 100 (Continue). Other interim answers, and trailers, end here.
    """

    def __init__(self, method: bytes, *, upgrade: bool = False) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []
        self.over = False
        self.go_on = False
        self.clean = True  # nothing came after its end
        self._method = method
        self._upgrade = upgrade
        self._other_bytes = 0  # since the last piece of a body
        self._whole = False
        self._until_end = False
        self._keeps = False
        self._parser = httptools.HttpResponseParser(self)
        # A service of one connection and one answer may be a shell script.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_data_after_close=True)

    @property
    def has_head(self) -> bool:
        """Whether status and headers are known."""
        return self._whole

    @property
    def keeps_connection(self) -> bool:
        """Whether another request may follow on the same connection."""
        return self.over and self.clean and not self._until_end and self._keeps

    def feed(self, data: bytes) -> None:
        """Bytes of the service; ``NoHttp`` where they are none of HTTP."""
        if self.over:
            self.clean = False
            return
        self._other_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.over:
                raise NoHttp(f"the service answered something that is no HTTP ({error})") from error
            self.clean = False
        if self._other_bytes > MAX_HEAD_BYTES:
            raise NoHttp(
                f"the head of the service's answer, or its trailers, are longer than {MAX_HEAD_BYTES} bytes"
            )

    def end(self) -> None:
        """The service closed the connection; ``NoHttp`` when something is missing."""
        if self.over:
            return
        if not self._whole or not self._until_end:
            raise NoHttp("the service closed the connection before the end of its answer")
        self.over = True

    # -- called by the parser -------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer."""
        if not self._whole:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._whole:  # of another answer, for which nobody asked
            self.clean = False
            return
        status = self._parser.get_status_code()
        if status == 101 and self._upgrade:
            self.status, self._whole, self.over = status, True, True
            return
        if status == 101 or not 100 <= status <= 599:
            raise NoHttp(f"the service answered with status {status}")
        if status < 200:
            self.go_on |= status == 100
            self.headers = []
            self._other_bytes = 0
            return
        if any(
            name.lower() == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers
        ):
            raise NoHttp("the service's answer has a Transfer-Encoding that is not chunked")
        self.status = status
        self._whole = True
        self._keeps = self._parser.should_keep_alive()
        names = {name.lower() for name, _ in self.headers}
        self._until_end = not names & {b"content-length", b"transfer-encoding"} and status not in _NO_BODY
        if self._method == b"HEAD" or status in _NO_BODY:
            self.over = True

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._other_bytes = 0
        if self.over:
            self.clean = False
        else:
            self.body.append(body)

    def on_message_complete(self) -> None:
        """The end of an answer, interim ones too."""
        if self._whole:
            self.over = True
