"""The most recently used ends of prompts are kept, and forgotten ones are never found."""

from keepsight.scheduling.prompt_ends import PromptEnds
from keepsight.scheduling.step_plan import EndName


def named(ends: PromptEnds, end_hash: bytes) -> EndName:
    name = ends.name(end_hash)
    assert name is not None
    return name


def keep(ends: PromptEnds, end_hash: bytes) -> EndName:
    name = named(ends, end_hash)
    ends.add(name)
    ends.check_invariants()
    return name


def test_an_end_is_found_once_it_is_kept() -> None:
    ends = PromptEnds(2)
    name = named(ends, b"a")
    assert ends.find(b"a") is None
    ends.add(name)
    assert ends.find(b"a") == name
    assert ends.num_found == 1


def test_the_least_recently_used_end_is_evicted_first_and_reported_once() -> None:
    ends = PromptEnds(2)
    keep(ends, b"a")
    least = keep(ends, b"b")
    ends.find(b"a")
    keep(ends, b"c")
    assert ends.take_evicted() == [least]
    assert ends.take_evicted() == []
    assert ends.find(b"a") is not None


def test_an_end_kept_twice_counts_as_used_the_second_time() -> None:
    ends = PromptEnds(2)
    earlier, later = keep(ends, b"a"), keep(ends, b"a")
    assert ends.take_evicted() == [earlier]
    assert ends.find(b"a") == later


def test_an_end_that_returns_before_its_eviction_is_reported_stays() -> None:
    ends = PromptEnds(1)
    first, other, again = (keep(ends, each) for each in (b"a", b"b", b"a"))
    assert ends.take_evicted() == [first, other]
    assert ends.find(b"a") == again


def test_ends_named_before_everything_was_forgotten_are_never_found() -> None:
    ends = PromptEnds(1)
    kept, under_way = keep(ends, b"a"), named(ends, b"b")
    ends.forget()
    ends.add(under_way)
    assert ends.take_evicted() == [kept, under_way]
    assert ends.find(b"a") is ends.find(b"b") is None


def test_without_room_nothing_is_named() -> None:
    ends = PromptEnds(0)
    assert ends.name(b"a") is None
    assert ends.find(b"a") is None
