import pytest

from spans import Download, Span


def test_nothing_received():
    download = Download(100)
    assert not download.complete
    assert download.progress == 0
    assert download.requests(limit=40) == [Span(0, 40), Span(40, 80), Span(80, 100)]


def test_all_in_one_part():
    download = Download(100)
    download.record(0, 100)
    assert download.complete
    assert download.progress == 1
    assert download.requests(limit=40) == []


def test_parts_out_of_order():
    download = Download(30)
    for offset in (20, 10, 0):
        download.record(offset, 10)
    assert download.complete


def test_parts_in_order():
    download = Download(30)
    for offset in (0, 10, 20):
        download.record(offset, 10)
    assert download.progress == 1
    assert download.complete


def test_part_received_twice_counts_once():
    download = Download(100)
    download.record(0, 50)
    download.record(0, 50)
    assert download.progress == 0.5


def test_part_of_nothing_is_ignored():
    download = Download(100)
    download.record(100, 0)
    assert len(download.received) == 0


def test_part_beyond_the_end_is_refused():
    with pytest.raises(ValueError, match="beyond the end"):
        Download(100).record(90, 11)


def test_damaged_bytes_are_asked_for_again():
    download = Download(100)
    download.record(0, 100)
    download.forget(30, 5)
    assert not download.complete
    assert download.requests(limit=100) == [Span(30, 35)]


def test_slack_joins_requests():
    download = Download(100)
    download.record(40, 4)
    assert download.requests(limit=100) == [Span(0, 40), Span(44, 100)]
    assert download.requests(limit=100, slack=4) == [Span(0, 100)]


def test_state_survives_a_restart():
    download = Download(100)
    download.record(0, 10)
    download.record(50, 25)
    again = Download.loads(download.dumps())
    assert again.received == download.received
    assert again.whole == download.whole


def test_state_with_bytes_beyond_the_end_is_refused():
    with pytest.raises(ValueError, match="beyond the end"):
        Download.loads('{"size": 10, "received": "0-10"}')
