from spans import Span, SpanSet


def make(*pairs):
    return SpanSet(Span(start, stop) for start, stop in pairs)


def test_empty():
    empty = SpanSet()
    assert len(empty) == 0
    assert empty.total == 0
    assert 0 not in empty
    assert not empty.covers(Span(0, 1))


def test_add_keeps_order_whatever_the_order_of_arrival():
    assert list(make((40, 50), (0, 10), (20, 30))) == [Span(0, 10), Span(20, 30), Span(40, 50)]


def test_add_joins_overlapping_spans():
    assert list(make((0, 10), (5, 15))) == [Span(0, 15)]
    assert list(make((5, 15), (0, 10))) == [Span(0, 15)]


def test_add_joins_the_span_that_ends_where_it_starts():
    assert list(make((0, 10), (10, 20))) == [Span(0, 20)]


def test_add_joins_the_span_that_starts_where_it_ends():
    assert list(make((10, 20), (0, 10))) == [Span(0, 20)]


def test_add_swallows_smaller_spans():
    assert list(make((2, 4), (6, 8), (10, 12), (0, 20))) == [Span(0, 20)]


def test_add_inside_changes_nothing():
    assert list(make((0, 20), (5, 6))) == [Span(0, 20)]


def test_add_keeps_a_gap_of_one():
    assert list(make((0, 10), (11, 20))) == [Span(0, 10), Span(11, 20)]
    assert list(make((11, 20), (0, 10))) == [Span(0, 10), Span(11, 20)]


def test_add_bridges_a_gap():
    assert list(make((0, 10), (20, 30), (8, 22))) == [Span(0, 30)]


def test_total_counts_integers_once():
    assert make((0, 10), (5, 15), (20, 21)).total == 16


def test_membership_at_the_edges():
    numbers = make((5, 10), (20, 21))
    assert [n for n in range(25) if n in numbers] == [5, 6, 7, 8, 9, 20]


def test_covers_needs_every_integer():
    numbers = make((0, 10), (12, 20))
    assert numbers.covers(Span(0, 10))
    assert numbers.covers(Span(13, 20))
    assert not numbers.covers(Span(9, 13))
    assert not numbers.covers(Span(19, 21))


def test_discard_cuts_a_hole():
    numbers = make((0, 20))
    numbers.discard(Span(5, 8))
    assert list(numbers) == [Span(0, 5), Span(8, 20)]


def test_discard_trims_both_neighbours():
    numbers = make((0, 10), (12, 14), (20, 30))
    numbers.discard(Span(8, 25))
    assert list(numbers) == [Span(0, 8), Span(25, 30)]


def test_discard_leaves_what_only_touches():
    numbers = make((0, 10), (20, 30))
    numbers.discard(Span(10, 20))
    assert list(numbers) == [Span(0, 10), Span(20, 30)]


def test_discard_of_nothing_there():
    numbers = make((0, 10))
    numbers.discard(Span(50, 60))
    assert list(numbers) == [Span(0, 10)]


def test_gaps_start_and_end_at_the_limits():
    numbers = make((5, 10), (20, 30))
    assert list(numbers.gaps(Span(0, 40))) == [Span(0, 5), Span(10, 20), Span(30, 40)]
    assert list(numbers.gaps(Span(7, 25))) == [Span(10, 20)]
    assert list(numbers.gaps(Span(6, 9))) == []


def test_set_operators():
    one, two = make((0, 10), (20, 30)), make((5, 25))
    assert one | two == make((0, 30))
    assert one & two == make((5, 10), (20, 25))
    assert one - two == make((0, 5), (25, 30))


def test_operators_leave_their_operands_alone():
    one, two = make((0, 10)), make((5, 15))
    _ = one | two, one & two, one - two
    assert (one, two) == (make((0, 10)), make((5, 15)))
