"""Spans are half open: adjacent spans do not overlap, and a cut at an edge cuts nothing."""

from keepsight.media import TokenSpan


def test_spans_that_touch_do_not_overlap() -> None:
    span = TokenSpan(3, 4)
    assert not span.overlaps(TokenSpan(7, 2))
    assert not span.overlaps(TokenSpan(0, 3))
    assert span.overlaps(TokenSpan(6, 1))
    assert span.overlaps(TokenSpan(0, 4))
    assert span.overlaps(span)


def test_a_span_is_cut_only_strictly_inside() -> None:
    span = TokenSpan(3, 4)
    assert [position for position in range(10) if span.is_cut_by(position)] == [4, 5, 6]
    assert [position for position in range(10) if position in span] == [3, 4, 5, 6]
