import pytest

from spans import Span


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (3, 3), (5, 2)])
def test_refuses_negative_and_empty(start, stop):
    with pytest.raises(ValueError, match="span"):
        Span(start, stop)


def test_length_and_membership():
    span = Span(10, 20)
    assert len(span) == 10
    assert 10 in span
    assert 19 in span
    assert 20 not in span


def test_neighbours_do_not_overlap():
    assert not Span(0, 10).overlaps(Span(10, 20))
    assert Span(0, 11).overlaps(Span(10, 20))


def test_intersection():
    assert Span(0, 10).intersection(Span(5, 20)) == Span(5, 10)
    assert Span(0, 5).intersection(Span(5, 20)) is None


def test_split_last_piece_is_shorter():
    assert list(Span(3, 13).split(4)) == [Span(3, 7), Span(7, 11), Span(11, 13)]


def test_split_refuses_pieces_of_nothing():
    with pytest.raises(ValueError, match="at least one"):
        list(Span(0, 4).split(0))
