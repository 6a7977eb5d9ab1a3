"""Addresses, answers and rules of a slot: pure values."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from aenv_run.errors import InvalidInput
from aenv_run.network import Answers, NetworkPolicy, SlotId
from aenv_run.network.addressing import UplinkPool, home_tag, network_slot
from aenv_run.network.answers import MAX_ADDRESSES_PER_NAME, MAX_NAMES, AnswerBook
from aenv_run.network.host import parse_openings
from aenv_run.network.requirements import dropping_table, legacy_drops
from aenv_run.network.rules import MAX_NAME_ADDRESSES, NameAddresses, RouterFacts, open_on_host, router_policy
from aenv_run.network.state import SlotFiles, SlotRecord

A, B = IPv4Address("203.0.113.1"), IPv4Address("203.0.113.2")


def test_slot_names() -> None:
    slot_id = SlotId.of("3fa2b1c0", 0x12)
    assert slot_id == "3fa2b1c0-0012" and slot_id.number == 18 and slot_id.tag == "3fa2b1c0"
    assert len(slot_id.uplink) <= 15  # the kernel's limit
    slot = network_slot(slot_id, "tap", UplinkPool.parse("100.96.0.0/16"))
    assert slot.guest_netns is None and slot.host_address == "100.96.0.37"
    assert home_tag(Path("/a")) != home_tag(Path("/b"))


@pytest.mark.parametrize("text", ["", "100.96.0.1/16", "100.96.0.0/30", "0.0.0.0/0", "fd00::/64", "x"])
def test_pools_that_are_none(text: str) -> None:
    with pytest.raises(InvalidInput):
        UplinkPool.parse(text)


def test_addresses_of_a_pool_never_overlap() -> None:
    pool = UplinkPool.parse("10.9.8.0/24")
    ends = [end for n in pool.numbers for end in (pool.host_end(n), pool.router_end(n))]
    assert len(set(ends)) == len(ends) == 254
    assert all(end in pool.network for end in ends)
    assert all(IPv4Network(f"{pool.host_end(n)}/31").network_address == pool.host_end(n) for n in pool.numbers)


def test_answers_are_renewed_before_they_end() -> None:
    now = [1000.0]
    book = AnswerBook(clock=lambda: now[0])
    assert book.note("a.org", [A], 30) == {A: 300}
    assert book.note("a.org", [A, B], 30) == {B: 300}
    now[0] += 200
    assert book.note("a.org", [A], 30) == {A: 300}
    now[0] += 299
    assert book.value() == Answers(names={"a.org": {str(A): 1500}})
    now[0] += 2
    assert book.value() == Answers()


def test_an_answer_outlives_its_ttl_in_the_rules() -> None:
    """The guest may use it until the TTL ends, whenever it was noted last."""
    now = [0.0]
    book = AnswerBook(clock=lambda: now[0])
    until = 0.0
    for _ in range(200):
        if fresh := book.note("a.org", [A], 600):
            until = now[0] + fresh[A]
        assert until >= now[0] + 600
        now[0] += 37


def test_answers_are_bounded() -> None:
    book = AnswerBook()
    book.note("many.org", [A + n for n in range(MAX_ADDRESSES_PER_NAME + 9)], 60)
    assert len(book.value().names["many.org"]) == MAX_ADDRESSES_PER_NAME
    for number in range(MAX_NAMES + 5):
        book.note(f"h{number}.org", [A], 60)
    assert len(book.value().names) == MAX_NAMES
    assert "many.org" not in book.value().names


def test_forgotten_answers_are_fresh_again() -> None:
    book = AnswerBook(clock=lambda: 0)
    assert book.note("a.org", [A], 60)
    assert not book.note("a.org", [A], 60)
    book.forget("a.org")
    assert book.note("a.org", [A], 60)


def test_answers_fit_the_set() -> None:
    book = AnswerBook(clock=lambda: 0)
    for number in range(400):
        addresses = [A + number * 100 + n for n in range(MAX_ADDRESSES_PER_NAME)]
        book.note(f"h{number}.org", addresses, 60 + number * 10)
    kept = book.under(NetworkPolicy(allow=tuple(f"h{n}.org" for n in range(400)))).allowed
    assert len(kept) == MAX_NAME_ADDRESSES
    assert A not in kept and A + 39900 in kept


def test_answers_under_a_policy() -> None:
    book = AnswerBook(clock=lambda: 0)
    book.note("bad.org", [A, B], 60)
    book.note("good.org", [B], 60)
    assert book.under(NetworkPolicy(deny=("bad.org",))) == NameAddresses(denied={A: 300})  # B serves good.org too
    assert book.under(NetworkPolicy(allow=("good.org",))) == NameAddresses(allowed={B: 300})
    assert book.under(NetworkPolicy()) == NameAddresses()


def test_rules_are_a_function_of_their_values() -> None:
    facts = RouterFacts(
        "tap", IPv4Address("100.96.0.2"), IPv4Address("100.96.0.3"), (IPv4Network("100.96.0.0/16"),)
    )
    policy = NetworkPolicy(allow=("10.0.0.0/8", "a.org"), deny=("b.org",))
    text = router_policy(facts, policy, NameAddresses(allowed={A: 9}), 7)
    assert text == router_policy(facts, policy, NameAddresses(allowed={A: 9}), 7)
    assert "203.0.113.1 timeout 9s" in text and "b.org" not in text
    assert text.index("@never return") < text.index("@opened") < text.index("@private return")
    assert text.index("@private return") < text.index("@allowed_names")


def test_openings_on_the_host() -> None:
    ten, part = IPv4Network("10.0.0.0/8"), IPv4Network("10.1.0.0/16")
    assert open_on_host(A, [ten], [ten]) == ""
    assert open_on_host(A, [], [ten]) == f"add element inet aenv opened {{ {A} . {ten} }}\n"
    lines = open_on_host(A, [ten], [part]).splitlines()
    assert [line.split()[0] for line in lines] == ["add", "delete", "add"]
    listed = b"""{"nftables": [{"metainfo": {}}, {"set": {"name": "opened", "elem": [
        {"concat": ["100.96.0.3", {"prefix": {"addr": "10.0.0.0", "len": 8}}]},
        {"concat": ["100.96.0.5", "10.1.1.1"]}]}}]}"""
    assert parse_openings(listed) == [("100.96.0.3", "10.0.0.0/8"), ("100.96.0.5", "10.1.1.1")]
    assert parse_openings(b'{"nftables": [{"set": {"name": "opened"}}]}') == []


NFT = """\
table inet aenv {
	chain forward {
		type filter hook forward priority filter + 5; policy accept;
	}
}
table ip filter {
	chain INPUT {
		type filter hook input priority filter; policy drop;
	}
	chain FORWARD {
		type filter hook forward priority filter; policy POLICY;
	}
}
"""
LEGACY = "-P FORWARD DROP\n-A FORWARD -j DOCKER-USER\n-A FORWARD -i docker0 ! -o docker0 -j ACCEPT\n"


def test_a_firewall_that_drops_what_it_forwards_is_seen() -> None:
    assert dropping_table(NFT.replace("POLICY", "drop")) == "ip filter"
    assert dropping_table(NFT.replace("POLICY", "accept")) == dropping_table("") == ""
    assert legacy_drops(LEGACY) and not legacy_drops("")
    assert not legacy_drops(LEGACY.replace("-P FORWARD DROP", "-P FORWARD ACCEPT"))
    one_way = LEGACY + "-A FORWARD -i aenv-u-+ -j ACCEPT\n"
    assert legacy_drops(one_way) and not legacy_drops(one_way + "-A FORWARD -o aenv-u-+ -j ACCEPT\n")


def test_records(tmp_path: Path) -> None:
    files = SlotFiles(tmp_path / "slots")
    assert files.slots() == {}
    record = SlotRecord(slot_id=SlotId("00000000-0001"), kind="tap", policy=NetworkPolicy(internet=False))
    files.write(record)
    (files.directory / "00000000-0002.json").write_text("not json")
    (files.directory / "00000000-0003.part").write_text("")
    (files.directory / "other.json").write_text("")
    assert files.slots() == {record.slot_id: record, "00000000-0002": None, "00000000-0003": None}
    files.remove(record.slot_id)
    files.remove(SlotId("00000000-0003"))
    assert set(files.slots()) == {"00000000-0002"}
