"""What a client is told when its request does not reach the service. The words are those that SDKs look for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from aenv_run.api.proxy.address import Target


@dataclass
class Refused(Exception):
    """The answer in place of the service's: JSON with ``code`` (the status) and ``message``."""

    status: int
    message: str
    more: dict[str, object] = field(default_factory=dict)
    #: Nothing was sent: the machine may be another by now, and takes the request.
    unsent: bool = False

    def body(self) -> bytes:
        """The JSON."""
        return json.dumps({**self.more, "message": self.message, "code": self.status}).encode()

    def raw(self) -> bytes:
        """A whole HTTP/1.1 answer, after which the connection is closed."""
        body = self.body()
        head = f"HTTP/1.1 {self.status} Refused\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


def not_found(target: Target) -> Refused:
    """There is no such sandbox, or it has ended."""
    return _told(target, "The sandbox was not found", e2b=502, agentenv=404)


def paused(target: Target) -> Refused:
    """It is paused and does not resume by itself. To E2B's SDKs that is as if it was not there."""
    if target.dialect == "e2b":
        return _told(target, "The sandbox was not found: it is paused and auto-resume is off", e2b=502)
    return _told(target, "the sandbox is paused and auto-resume is off", agentenv=410)


def closed_port(target: Target) -> Refused:
    """Nothing listens there."""
    refused = _told(target, "The sandbox is running but port is not open")
    refused.more["port"] = target.port
    return refused


def traffic_token(target: Target) -> Refused:
    """The port is private and the token is missing or wrong."""
    message = "this port is private: the header e2b-traffic-access-token is missing or wrong"
    return _told(target, message, e2b=403, agentenv=401)


def envd_token(target: Target, why: str) -> Refused:
    """The daemon is for those who have its token."""
    return _told(target, f"the access token is missing or wrong: {why}", e2b=401, agentenv=401)


def private_call(target: Target) -> Refused:
    """A call of the daemon that is the node's alone."""
    return _told(target, "only the node of this sandbox may call this", e2b=403, agentenv=403)


def only_http(target: Target) -> Refused:
    """The daemon's port: each call of it is looked at."""
    return _told(target, "this port takes HTTP requests alone", e2b=403, agentenv=403)


def unreachable(target: Target, why: str) -> Refused:
    """The connection to the service failed, or broke before an answer."""
    return _told(target, f"the sandbox could not be reached: {why}")


def no_resume(target: Target, why: str) -> Refused:
    """It is paused, should resume by itself, and does not."""
    return _told(target, f"the sandbox could not be resumed: {why}")


def no_room(target: Target, why: str) -> Refused:
    """It is paused, should resume by itself, and as many as may run do."""
    return _told(target, f"the sandbox could not be resumed: {why}", e2b=503, agentenv=503)


def too_slow(target: Target, what: str) -> Refused:
    """A time limit was used up."""
    return _told(target, what, e2b=504, agentenv=504)


def _told(target: Target, message: str, *, e2b: int = 502, agentenv: int = 502) -> Refused:
    status = e2b if target.dialect == "e2b" else agentenv
    return Refused(status, message, {"sandboxId": target.sandbox_id})
