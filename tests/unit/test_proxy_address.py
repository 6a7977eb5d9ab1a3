"""Whose a request is: one row of the table is one rule."""

from __future__ import annotations

import pytest

from aenv_run.api.proxy.address import Misrouted, Target, target_of
from aenv_run.types import SandboxId

A, B = SandboxId("s" + "a" * 19), SandboxId("s" + "b" * 19)
DOMAINS = ("sandbox.example.org", "localtest.me")
HOST_A = f"8080-{A}.sandbox.example.org"
E2B_B = {"e2b-sandbox-id": B, "e2b-sandbox-port": "49983"}
AENV_A = {"x-agentenv-sandbox-id": A, "x-agentenv-target-port": "3000"}


def decide(path: str, *headers: tuple[str, str], **named: str) -> Target | Misrouted | None:
    pairs = [*headers, *((name.replace("_", "-"), value) for name, value in named.items())]
    return target_of([(name.encode(), value.encode("latin-1")) for name, value in pairs], path.encode(), DOMAINS)


FOUND: list[tuple[str, str, dict[str, str], Target | None]] = [
    ("by host", "/x", {"host": HOST_A}, Target(A, 8080, b"/x")),
    ("by host with a port", "/", {"host": HOST_A + ":8000"}, Target(A, 8080, b"/")),
    ("by host in capitals", "/", {"host": HOST_A.upper()}, Target(A, 8080, b"/")),
    ("by host with the last dot", "/", {"host": HOST_A + "."}, Target(A, 8080, b"/")),
    ("by host, dot and port", "/", {"host": HOST_A + ".:80"}, Target(A, 8080, b"/")),
    ("another domain", "/", {"host": f"1-{A}.localtest.me"}, Target(A, 1, b"/")),
    ("host beats headers", "/", {"host": HOST_A, **E2B_B}, Target(A, 8080, b"/")),
    ("host keeps /proxy", "/proxy/y", {"host": HOST_A}, Target(A, 8080, b"/proxy/y")),
    ("host keeps control paths", "/sandboxes/x", {"host": HOST_A}, Target(A, 8080, b"/sandboxes/x")),
    ("the path is not touched", "/%2e%2E/a%2Fb//", {"host": HOST_A}, Target(A, 8080, b"/%2e%2E/a%2Fb//")),
    ("by E2B's headers", "/health", E2B_B, Target(B, 49983, b"/health")),
    ("files at the root", "/files", {"host": "api.x", **E2B_B}, Target(B, 49983, b"/files")),
    ("RPC at the root", "/process.Process/Start", E2B_B, Target(B, 49983, b"/process.Process/Start")),
    ("metrics of the sandbox", "/metrics", E2B_B, Target(B, 49983, b"/metrics")),
    ("by our headers", "/", AENV_A, Target(A, 3000, b"/", "agentenv")),
    ("ours beat E2B's", "/", {**E2B_B, **AENV_A}, Target(A, 3000, b"/", "agentenv")),
    ("/proxy", "/proxy", E2B_B, Target(B, 49983, b"/")),
    ("/proxy/", "/proxy/", E2B_B, Target(B, 49983, b"/")),
    ("/proxy/path", "/proxy/a/b", AENV_A, Target(A, 3000, b"/a/b", "agentenv")),
    ("/proxy/proxy", "/proxy/proxy/a", E2B_B, Target(B, 49983, b"/proxy/a")),
    ("/proxy/sandboxes", "/proxy/sandboxes/a", E2B_B, Target(B, 49983, b"/sandboxes/a")),
    ("another word", "/proxyed", E2B_B, Target(B, 49983, b"/proxyed")),
    ("the server's own", "/sandboxes", {"host": "localhost:8000"}, None),
    ("no Host", "/health", {}, None),
    ("IPv6", "/health", {"host": "[::1]:8000"}, None),
    ("the domain itself", "/", {"host": "sandbox.example.org"}, None),
    ("a name below it", "/", {"host": "api.sandbox.example.org"}, None),
    ("two labels", "/", {"host": f"x.8080-{A}.sandbox.example.org"}, None),
    ("another domain's end", "/", {"host": f"8080-{A}.evilsandbox.example.org"}, None),
    ("an unknown domain", "/", {"host": f"8080-{A}.example.com"}, None),
    ("a control call with headers", f"/sandboxes/{A}/pause", E2B_B, None),
    ("a second-version control call", f"/v2/sandboxes/{A}/connect", E2B_B, None),
]


@pytest.mark.parametrize(("path", "headers", "target"), [row[1:] for row in FOUND], ids=[row[0] for row in FOUND])
def test_a_request_is_led_to_its_sandbox(path: str, headers: dict[str, str], target: Target | None) -> None:
    assert decide(path, **{name.replace("-", "_"): value for name, value in headers.items()}) == target


WRONG: list[tuple[str, str, list[tuple[str, str]], str]] = [
    ("two Hosts", "/", [("host", HOST_A), ("host", HOST_A)], "more than one Host"),
    ("an id twice", "/", [*E2B_B.items(), ("e2b-sandbox-id", B)], "once each"),
    ("a port twice", "/", [*AENV_A.items(), ("x-agentenv-target-port", "3000")], "once each"),
    ("no port", "/", [("e2b-sandbox-id", B)], "once each"),
    ("no id", "/", [("e2b-sandbox-port", "1")], "once each"),
    ("half of ours, all of E2B's", "/", [*E2B_B.items(), ("x-agentenv-sandbox-id", A)], "once each"),
    ("no headers for /proxy", "/proxy/x", [("host", "localhost")], "needs the headers"),
    ("port 0", "/", [("host", f"0-{A}.localtest.me")], "not a port"),
    ("port 65536", "/", [("host", f"65536-{A}.localtest.me")], "not a port"),
    ("a long port", "/", [("host", f"{'1' * 40}-{A}.localtest.me")], "not a port"),
    ("a port with a sign", "/", [("e2b-sandbox-id", B), ("e2b-sandbox-port", "+80")], "not a port"),
    ("a port of another script", "/", [("e2b-sandbox-id", B), ("e2b-sandbox-port", "\xb2")], "not a port"),
    ("an id that is a path", "/", [("e2b-sandbox-id", "../../x"), ("e2b-sandbox-port", "1")], "not a valid"),
    ("the start of an id", "/", [("e2b-sandbox-id", B[:8]), ("e2b-sandbox-port", "1")], "not a valid"),
    ("an empty id", "/", [("host", "80-.localtest.me")], "not a valid"),
    (
        "a header in capitals",
        "/",
        [("e2b-sandbox-id", B.upper()), ("e2b-sandbox-port", "1")],
        "not a valid",
    ),
]


@pytest.mark.parametrize(("path", "headers", "reason"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_request_that_names_a_sandbox_wrongly_is_refused(
    path: str, headers: list[tuple[str, str]], reason: str
) -> None:
    found = decide(path, *headers)
    assert isinstance(found, Misrouted) and reason in found.message
