"""What goes on to a service and back: byte for byte, but for what belongs to a connection or to us."""

from __future__ import annotations

import pytest

from aenv_run.api.proxy.address import ENVD_PORT, Target
from aenv_run.api.proxy.headers import CODE_INTERPRETER_PORT, Asked, Mask, request_headers, response_headers
from aenv_run.types import SandboxId

ID = SandboxId("s" + "a" * 19)
OUTER = f"8080-{ID}.sandbox.example.org:8000"
KEY = b"e2b_" + b"0" * 64
Pairs = list[tuple[bytes, bytes]]


def passed(*headers: tuple[bytes, bytes], port: int = 8080, template: str | None = None, **more: str) -> Pairs:
    """What a service gets of a request with these headers."""
    given = ((b"host", OUTER.encode()), *headers)
    asked = Asked(b"GET", b"a=1&a=%20", given, more.get("scheme", "http"), more.get("peer", "127.0.0.1"))
    target = Target(ID, port, b"/a%2Fb")
    mask = Mask.of(target, asked, template)
    return request_headers(target, asked, mask, api_key=KEY, token=more.get("token"))


def only(found: Pairs, name: bytes) -> list[bytes]:
    return [value for key, value in found if key == name]


def test_values_order_and_repetitions_are_kept() -> None:
    sent = [(b"x-a", b"1"), (b"cookie", b"a=\xff; b"), (b"x-a", b" 2,  3 "), (b"x-b", b""), (b"x-a", b"1")]
    found = passed(*sent)
    assert [pair for pair in found if pair[0] in (b"x-a", b"x-b", b"cookie")] == sent


def test_what_belongs_to_a_connection_or_to_us_stays_here() -> None:
    dropped = [
        (b"connection", b"close, X-Hop"),
        (b"x-hop", b"1"),
        *[(name, b"x") for name in (b"keep-alive", b"te", b"trailer", b"upgrade", b"proxy-authorization")],
        (b"transfer-encoding", b"chunked"),
        *[(name, b"x") for name in (b"e2b-sandbox-id", b"e2b-sandbox-port", b"x-agentenv-sandbox-id")],
        (b"x-agentenv-target-port", b"1"),
        (b"e2b-traffic-access-token", b"t"),
        (b"x-access-token", b"of the daemon"),
        (b"x-api-key", KEY),
    ]
    assert {name for name, _ in passed(*dropped)} == {
        *(b"host", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-method", b"x-forwarded-uri"),
        b"x-forwarded-for",
    }


def test_a_key_that_is_not_ours_is_the_services() -> None:
    assert only(passed((b"x-api-key", b"another")), b"x-api-key") == [b"another"]


def test_connection_takes_nothing_away_that_makes_the_message() -> None:
    found = passed((b"connection", b"content-length, host, content-type"), (b"content-length", b"3"))
    assert only(found, b"content-length") == [b"3"] and len(only(found, b"host")) == 1


def test_the_code_interpreter_gets_the_token_of_its_caller() -> None:
    found = passed((b"x-access-token", b"client's"), port=CODE_INTERPRETER_PORT)
    assert only(found, b"x-access-token") == [b"client's"]


def test_the_daemon_gets_its_token_and_the_outer_host() -> None:
    found = passed((b"x-access-token", b"client's"), port=ENVD_PORT, token="right")
    assert only(found, b"x-access-token") == [b"right"]
    assert only(found, b"host") == [OUTER.encode()]


def test_what_is_forwarded_is_told() -> None:
    found = passed((b"x-forwarded-host", b"evil"), (b"x-forwarded-for", b"9.9.9.9"), peer="192.0.2.7")
    assert only(found, b"x-forwarded-host") == [OUTER.encode()]
    assert only(found, b"x-forwarded-uri") == [b"/a%2Fb?a=1&a=%20"]
    assert only(found, b"x-forwarded-method") == [b"GET"]
    assert only(found, b"x-forwarded-for") == [b"192.0.2.7"]
    assert only(found, b"x-forwarded-proto") == [b"http"]


def test_a_proxy_on_this_host_is_believed() -> None:
    sent = [(b"x-forwarded-proto", b"https"), (b"x-forwarded-for", b"198.51.100.9")]
    found = passed(*sent)
    assert only(found, b"x-forwarded-proto") == [b"https"]
    assert only(found, b"x-forwarded-for") == [b"198.51.100.9", b"127.0.0.1"]
    assert only(passed(*sent, peer="192.0.2.7"), b"x-forwarded-proto") == [b"http"]


@pytest.mark.parametrize(
    ("template", "inner"),
    [
        (None, b"localhost:8080"),
        ("app.test", b"app.test"),
        ("p${PORT}.test:${PORT}", b"p8080.test:8080"),
        ("${HOST}", OUTER.encode()),
    ],
)
def test_a_service_sees_the_host_of_the_sandbox(template: str | None, inner: bytes) -> None:
    assert only(passed(template=template), b"host") == [inner]


def test_the_clients_own_origin_becomes_the_services() -> None:
    own = f"http://{OUTER}".encode()
    found = passed((b"origin", own), (b"referer", own + b"/page?x=1"))
    assert only(found, b"origin") == [b"http://localhost:8080"]
    assert only(found, b"referer") == [b"http://localhost:8080/page?x=1"]
    # Frameworks compare the origin with this one where it is there.
    assert only(found, b"x-forwarded-host") == []


@pytest.mark.parametrize("origin", [b"null", b"https://other.example", f"http://{OUTER}.evil.example".encode()])
def test_another_origin_stays_another(origin: bytes) -> None:
    found = passed((b"origin", origin))
    assert only(found, b"origin") == [origin] and only(found, b"x-forwarded-host") == [OUTER.encode()]


MASK = Mask("https", b"8080-x.example.org", b"localhost:8080")


def test_an_answer_keeps_its_headers() -> None:
    sent = [(b"Set-Cookie", b"a=1"), (b"Set-Cookie", b"b=2"), (b"X-Hop", b"1"), (b"Content-Length", b"3")]
    found = response_headers([*sent, (b"Connection", b"x-hop, Set-Cookie2")], MASK, status=200)
    assert found == [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"content-length", b"3")]


@pytest.mark.parametrize("status", [204, 304])
def test_without_a_body_there_is_no_length(status: int) -> None:
    assert response_headers([(b"Content-Length", b"3"), (b"ETag", b"x")], MASK, status=status) == [(b"etag", b"x")]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"http://localhost:8080/login?next=/", b"https://8080-x.example.org/login?next=/"),
        (b"https://localhost:8080", b"https://8080-x.example.org"),
        (b"http://localhost:80801/", b"http://localhost:80801/"),
        (b"/login", b"/login"),
        (b"https://accounts.example.com/", b"https://accounts.example.com/"),
    ],
)
def test_a_redirection_to_the_service_leads_to_the_client(sent: bytes, told: bytes) -> None:
    assert response_headers([(b"Location", sent)], MASK, status=302) == [(b"location", told)]
