"""The guest's DNS server without a network: what it says to odd questions."""

from __future__ import annotations

import os
from ipaddress import IPv4Address
from pathlib import Path

import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from aenv_run.errors import InvalidInput
from aenv_run.network import NetworkConfig, NetworkPolicy
from aenv_run.network.resolver import Forwarder, Upstream


async def admit(name: str, addresses: tuple[IPv4Address, ...], ttl_s: int) -> bool:
    return True


def server(policy: NetworkPolicy | None = None) -> Forwarder:
    nobody = Upstream(resolv_conf=Path("/nonexistent/resolv.conf"))
    return Forwarder(lambda: policy or NetworkPolicy(), nobody, admit)


async def ask(query: dns.message.Message, policy: NetworkPolicy | None = None) -> dns.message.Message:
    wire = await server(policy).answer(query.to_wire(), tcp=False)
    assert wire is not None
    answer = dns.message.from_wire(wire)
    assert answer.id == query.id
    return answer


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_get_an_answer_or_none(data: bytes) -> None:
    coroutine = server(NetworkPolicy(internet=False)).answer(data, tcp=False)
    with pytest.raises(StopIteration) as done:  # nothing is waited for: every name is refused
        coroutine.send(None)
    answer = done.value.value
    assert answer is None or (answer[:2] == data[:2] and answer[2] & 0x80)


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=6), st.integers(1, 300))
def test_any_name_and_type(labels: list[bytes], kind: int) -> None:
    query = dns.message.make_query(dns.name.Name([*labels, b""]), dns.rdatatype.RdataType(kind))
    coroutine = server(NetworkPolicy(internet=False, allow=("*.example.org",))).answer(query.to_wire(), tcp=False)
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert dns.message.from_wire(done.value.value).rcode() in (dns.rcode.NXDOMAIN, dns.rcode.REFUSED)


async def test_answers_are_not_answered() -> None:
    answer = dns.message.make_response(dns.message.make_query("a.org", "A"))
    assert await server().answer(answer.to_wire(), tcp=False) is None


async def test_odd_questions() -> None:
    notify = dns.message.make_query("a.org", "SOA")
    notify.set_opcode(dns.opcode.NOTIFY)
    assert (await ask(notify)).rcode() == dns.rcode.NOTIMP
    double = dns.message.make_query("a.org", "A")
    double.question.append(dns.rrset.RRset(dns.name.from_text("b.org."), dns.rdataclass.IN, dns.rdatatype.A))
    assert (await ask(double)).rcode() == dns.rcode.FORMERR
    assert (await ask(dns.message.make_query("version.bind", "TXT", "CH"))).rcode() == dns.rcode.REFUSED
    assert (await ask(dns.message.make_query("a.org", "AXFR"))).rcode() == dns.rcode.REFUSED
    dotted = dns.message.make_query(dns.name.Name([b"a.example", b"org", b""]), "A")
    assert (await ask(dotted, NetworkPolicy(allow=("*.example.org",)))).rcode() == dns.rcode.REFUSED


async def test_no_name_server_is_a_server_failure() -> None:
    assert (await ask(dns.message.make_query("a.org", "A"))).rcode() == dns.rcode.SERVFAIL


async def test_a_denied_name_says_why() -> None:
    answer = await ask(dns.message.make_query("a.org", "A", use_edns=0), NetworkPolicy(internet=False))
    assert answer.rcode() == dns.rcode.NXDOMAIN
    assert "policy" in str(answer.options[0])


def test_name_servers_follow_the_file(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("search example.org\nnameserver 203.0.113.1\nnameserver 203.0.113.2\n")
    upstream = Upstream(resolv_conf=file)
    assert upstream.servers() == ("203.0.113.1", "203.0.113.2")
    file.write_text("nameserver 203.0.113.3\n")
    os.utime(file, ns=(1, 1))
    assert upstream.servers() == ("203.0.113.3",)
    file.unlink()
    assert upstream.servers() == ("203.0.113.3",)  # while it is being replaced
    assert Upstream(("203.0.113.9",), file).servers() == ("203.0.113.9",)


def test_settings() -> None:
    with pytest.raises(ValidationError, match="high_water"):
        NetworkConfig(low_water=3, high_water=2)
    with pytest.raises(InvalidInput, match="CIDRs"):
        NetworkConfig(always_denied=("example.org",))
