import pytest

from keepsight.bench.event_stream import EventReader

STREAM = b': a comment\n\ndata: {"a": 1}\n\nevent: x\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_one_piece_may_hold_several_events() -> None:
    assert EventReader().feed(STREAM) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 7, 30])
def test_pieces_may_end_anywhere(size: int) -> None:
    reader = EventReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_an_event_comes_out_as_soon_as_its_line_ends() -> None:
    reader = EventReader()
    assert reader.feed(b"data: 1") == []
    assert reader.feed(b"2\n") == [b"12"]
