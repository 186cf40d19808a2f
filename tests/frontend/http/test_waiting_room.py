"""Limits are never exceeded, and what was taken is given back however a request ends."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import ServerOverloadedError
from keepsight.frontend.http.waiting_room import WaitingRoom


@given(st.lists(st.integers(0, 7), max_size=30))
def test_neither_limit_is_exceeded_and_everything_is_given_back(sizes: list[int]) -> None:
    room = WaitingRoom(max_requests=3, max_bytes=10)
    with contextlib.ExitStack() as stack:
        for size in sizes:
            is_full = room.num_requests == 3
            with contextlib.suppress(ServerOverloadedError):
                stack.enter_context(room.admit())
                assert not is_full
                assert room.has_room == (room.num_requests < 3 and room.num_bytes < 10)
                room.take_bytes(size)
                stack.callback(room.give_back_bytes, size)
            room.check_invariants()
    assert (room.num_requests, room.num_bytes) == (0, 0)


def test_a_request_that_fails_gives_up_its_place() -> None:
    room = WaitingRoom(max_requests=1, max_bytes=1)
    with pytest.raises(ValueError, match="broken"), room.admit():
        raise ValueError("broken")
    with room.admit(), pytest.raises(ServerOverloadedError), room.admit():
        pass
