import pytest

from spans import Span, SpanSet
from spans.text import format_spans, parse_content_range, parse_spans, range_header


def test_format_is_inclusive():
    assert format_spans([Span(0, 10), Span(20, 21)]) == "0-9,20-20"
    assert format_spans([]) == ""


def test_range_header():
    assert range_header([Span(0, 500)]) == "bytes=0-499"


def test_range_header_refuses_nothing():
    with pytest.raises(ValueError, match="at least one byte"):
        range_header([])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-9", [Span(0, 10)]),
        ("20-29, 0-9", [Span(0, 10), Span(20, 30)]),
        ("0-9,5-14", [Span(0, 15)]),
        ("90-", [Span(90, 100)]),
        ("-5", [Span(95, 100)]),
        ("-500", [Span(0, 100)]),
        ("", []),
    ],
)
def test_parse(text, expected):
    assert list(parse_spans(text, size=100)) == expected


def test_parse_joins_neighbours():
    assert format_spans(parse_spans("0-9,10-19,20-29")) == "0-29"


def test_parse_is_the_inverse_of_format():
    spans = SpanSet([Span(0, 1), Span(7, 19), Span(30, 31)])
    assert parse_spans(format_spans(spans)) == spans


@pytest.mark.parametrize("text", ["-", "a-b", "5", "9-3", "1-2-3"])
def test_parse_refuses(text):
    with pytest.raises(ValueError):
        parse_spans(text, size=100)


def test_open_end_needs_the_size():
    with pytest.raises(ValueError, match="size is not known"):
        parse_spans("20-")


def test_content_range():
    assert parse_content_range("bytes 0-99/1000") == (Span(0, 100), 1000)
    assert parse_content_range("bytes 5-5/*") == (Span(5, 6), None)


def test_content_range_refuses_other_units():
    with pytest.raises(ValueError, match="Content-Range"):
        parse_content_range("items 0-9/10")
