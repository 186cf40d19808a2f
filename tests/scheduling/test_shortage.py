"""Whom a shortage keeps out, and until when."""

from itertools import count

from keepsight.scheduling.admit_request import make_states
from keepsight.scheduling.request_state import RequestState
from keepsight.scheduling.shortage import Shortage
from tests.scheduling.drive import make_config, make_request


def state_at(arrival: int) -> RequestState:
    [state] = make_states(make_request(str(arrival), 1), count(arrival), make_config(), frozenset())
    return state


def test_only_those_behind_the_one_who_is_short_are_kept_out_until_it_ends() -> None:
    first, short, last = (state_at(arrival) for arrival in range(3))
    shortage = Shortage()
    assert not shortage.keeps_out(last)
    shortage.begin(short)
    assert [shortage.keeps_out(state) for state in (first, short, last)] == [False, False, True]
    shortage.end(last)
    assert shortage.keeps_out(last)
    shortage.end(short)
    assert not shortage.keeps_out(last)


def test_one_before_who_is_short_too_takes_its_place() -> None:
    first, second, last = (state_at(arrival) for arrival in range(3))
    shortage = Shortage()
    shortage.begin(second)
    shortage.begin(first)
    assert shortage.keeps_out(second)
    shortage.end(second)
    assert shortage.keeps_out(last)
