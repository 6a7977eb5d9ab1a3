"""The policy as a value: entries, precedence, names, and what becomes of E2B's lists."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from aenv_run.errors import InvalidInput
from aenv_run.network import NetworkPolicy
from aenv_run.network.policy import NameVerdict, names_domain, parse_target


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("203.0.113.7", "203.0.113.7/32"),
        ("203.0.113.0/24", "203.0.113.0/24"),
        (" Example.ORG. ", "example.org"),
        ("*.example.org", "*.example.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("localhost", "localhost"),
        ("cafe", "cafe"),
        ("_acme.example.org", "_acme.example.org"),
    ],
)
def test_entries_are_canonical(text: str, canonical: str) -> None:
    assert NetworkPolicy(allow=(text,)).allow == (canonical,)
    assert str(parse_target(canonical)) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*",
        "*.",
        "10.0.0.1/8",
        "10.0.0.0/33",
        "1.2.3",
        "1.2.3.4:80",
        "https://example.org",
        "example.org/path",
        "exa mple.org",
        "*.*.org",
        "a.*.org",
        "-a.org",
        "a..org",
        "::1",
        "2001:db8::/32",
        "x" * 64 + ".org",
        'a" accept #',
        "a;drop",
        "a\nb.org",
    ],
)
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        NetworkPolicy(allow=(text,))


def test_lists_are_bounded_and_keys_are_known() -> None:
    with pytest.raises(ValidationError):
        NetworkPolicy(deny=tuple(f"h{number}.example.org" for number in range(1001)))
    with pytest.raises(ValidationError):
        NetworkPolicy.model_validate({"allowed": []})


def test_round_trip() -> None:
    policy = NetworkPolicy(internet=False, allow=("a.org", "10.0.0.0/8"), deny=("*.b.org",))
    assert NetworkPolicy.model_validate_json(policy.model_dump_json()) == policy


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("example.org", "example.org", True),
        ("example.org", "www.example.org", False),
        ("*.example.org", "www.example.org", True),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "badexample.org", False),
        ("*.example.org", ".example.org", False),
    ],
)
def test_domain_patterns(pattern: str, name: str, expected: bool) -> None:
    assert names_domain(pattern, name) is expected


def test_names_are_judged() -> None:
    assert NetworkPolicy().judge("a.org") is NameVerdict.RESOLVE
    assert NetworkPolicy(deny=("a.org",)).judge("a.org") is NameVerdict.REFUSE
    assert NetworkPolicy(allow=("a.org",)).judge("a.org") is NameVerdict.ADMIT
    assert NetworkPolicy(allow=("a.org",)).judge("b.org") is NameVerdict.REFUSE
    assert NetworkPolicy(allow=("*.a.org",), deny=("b.a.org",)).judge("b.a.org") is NameVerdict.REFUSE
    assert NetworkPolicy(internet=False).judge("a.org") is NameVerdict.REFUSE
    assert NetworkPolicy(allow=("203.0.113.0/24",)).judge("a.org") is NameVerdict.REFUSE
    assert NetworkPolicy(allow=("0.0.0.0/0", "10.0.0.1")).judge("a.org") is NameVerdict.RESOLVE


def test_only_an_entry_within_a_private_range_opens_it() -> None:
    assert NetworkPolicy(allow=("0.0.0.0/0", "8.0.0.0/5")).opened == ()
    assert NetworkPolicy(allow=("10.1.0.0/16", "10.1.2.0/24")).opened == (IPv4Network("10.1.0.0/16"),)
    assert NetworkPolicy(allow=("169.254.169.254",)).opened == (IPv4Network("169.254.169.254/32"),)
    assert NetworkPolicy(allow=("127.0.0.1", "224.0.0.1")).opened == ()


def test_lists_where_allow_wins() -> None:
    convert = NetworkPolicy.allow_wins
    assert convert(internet=True, allow=["8.8.8.8"], deny=[]) == NetworkPolicy()
    assert convert(internet=True, allow=["8.8.8.8", "a.org"], deny=["0.0.0.0/0"]).allow == ("8.8.8.8/32", "a.org")
    assert convert(internet=False, allow=[], deny=[]) == NetworkPolicy(internet=False)
    with pytest.raises(InvalidInput, match="no effect"):
        convert(internet=True, allow=["a.org"], deny=["8.8.8.8"])


networks = st.builds(
    lambda address, length: str(IPv4Network((address, length), strict=False)),
    st.integers(0, 2**32 - 1),
    st.integers(1, 32),
)


@settings(deadline=None)
@given(st.lists(networks, max_size=4), st.lists(networks, max_size=4), st.integers(0, 2**32 - 1))
def test_cut_out_networks_are_exact(allow: list[str], deny: list[str], number: int) -> None:
    address = IPv4Address(number)
    policy = NetworkPolicy.allow_wins(internet=True, allow=allow, deny=deny)
    denied = any(address in IPv4Network(text) for text in deny)
    allowed = any(address in IPv4Network(text) for text in allow)
    reachable = not any(address in network for network in policy.deny_networks) and (
        not policy.restricted or any(address in network for network in policy.allow_networks)
    )
    assert reachable is (allowed or not denied)
