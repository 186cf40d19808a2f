"""A request goes to the engine that holds its media, else to the least busy; never to one that is far busier."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepsight.frontend import choose_engine as choosing
from keepsight.frontend.choose_engine import (
    SHORTEST_PREFIX,
    SLACK_TOKENS,
    TYPICAL_ANSWER_TOKENS,
    EngineView,
    choose_engine,
    count_tokens,
    name_prefixes,
)
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import EngineRequest
from keepsight.sampling_params import SamplingParams

NUMBERS = iter(range(1_000_000))


def request(*media: str, length: int = 40, first: int = 7, salt: str | None = None, n: int = 1) -> EngineRequest:
    """Return a request of `length` tokens that begins with its media, 4 tokens each."""
    items = tuple(MediaItem(each, TokenSpan(4 * index, 4), Geometry(1, 1)) for index, each in enumerate(media))
    tokens = (first, *range(1, length))
    return EngineRequest(f"{next(NUMBERS)}", tokens, items, SamplingParams(max_tokens=10, n=n), cache_salt=salt)


def busy(num_tokens: int) -> EngineView:
    engine = EngineView()
    engine.note_sent(request(length=num_tokens - 10, first=8))
    assert engine.num_tokens_in_flight == num_tokens
    return engine


def test_an_answer_is_expected_to_be_of_max_tokens_or_typical_length() -> None:
    assert count_tokens(request(length=40, n=3)) == 40 + 3 * 10
    endless = EngineRequest("e", (1, 2), (), SamplingParams(max_tokens=None))
    assert count_tokens(endless) == 2 + TYPICAL_ANSWER_TOKENS


def test_a_request_goes_where_its_picture_is_held_even_if_others_are_less_busy() -> None:
    holder, idle = busy(500), EngineView()
    holder.hints.note_held(["a"])
    assert choose_engine(request("a"), [idle, holder]) is holder
    assert choose_engine(request("b"), [holder, idle]) is idle


def test_a_silent_engine_gets_a_request_only_if_all_others_are_silent_or_lack_what_cannot_be_made() -> None:
    silent, other = EngineView(), busy(500)
    silent.is_silent = True
    silent.hints.note_held(["a"])
    assert choose_engine(request("a"), [silent, other]) is other
    assert choose_engine(request("a"), [silent, other], unmakeable=["a"]) is silent
    other.is_silent = True
    assert choose_engine(request("a"), [silent, other]) is silent


def test_a_picture_in_flight_to_an_engine_attracts_other_requests() -> None:
    engines = [EngineView(), EngineView()]
    first = request("a")
    chosen = choose_engine(first, engines)
    chosen.note_sent(first)
    assert all(choose_engine(request("a"), order) is chosen for order in (engines, engines[::-1]))
    chosen.note_ended(first.request_id)
    assert choose_engine(request("a"), [each for each in engines if each is not chosen] + [chosen]) is not chosen


def test_media_are_in_flight_until_the_last_request_that_shows_them_ends() -> None:
    engine, twice, once = EngineView(), request("a", "b", "a"), request("a")
    engine.note_sent(twice)
    engine.note_sent(once)
    engine.note_ended(twice.request_id)
    assert (engine.holds("a"), engine.holds("b")) == (True, False)
    engine.check_invariants()
    engine.note_ended(once.request_id)
    engine.note_ended(once.request_id)
    assert not engine.holds("a")
    engine.check_invariants()


def test_the_engine_that_holds_more_media_is_chosen() -> None:
    one, two = EngineView(), busy(500)
    one.hints.note_held(["a"])
    two.hints.note_held(["a", "b"])
    assert choose_engine(request("a", "b", "c"), [one, two]) is two


def test_a_popular_picture_spreads_to_other_engines() -> None:
    holder, idle = busy(SLACK_TOKENS + 1), EngineView()
    holder.hints.note_held(["a"])
    assert choose_engine(request("a"), [holder, idle]) is idle
    assert choose_engine(request("a"), [holder, busy(600)]) is holder


def test_media_that_cannot_be_made_go_where_all_of_them_are_held_however_busy_that_engine_is() -> None:
    holder, half, idle = busy(SLACK_TOKENS + 1), EngineView(1), EngineView(2)
    holder.hints.note_held(["a", "b"])
    half.hints.note_held(["a"])
    engines = [half, idle, holder]
    assert choose_engine(request("a", "b"), engines, unmakeable=("a", "b")) is holder
    assert choose_engine(request("a", "b"), engines, "k", unmakeable=("b",)) is holder
    assert choose_engine(request("a", "b"), engines, unmakeable=("a",)) is half


def test_load_is_balanced_among_the_engines_that_hold_what_cannot_be_made() -> None:
    holders = [busy(SLACK_TOKENS + 1), EngineView(1)]
    for engine in holders:
        engine.hints.note_held(["a"])
    holders[0].hints.note_held(["b"])
    assert choose_engine(request("a", "b"), [*holders, EngineView(2)], unmakeable=("a",)) is holders[1]


def test_media_that_cannot_be_made_go_where_they_are_held_and_else_where_they_are_expected() -> None:
    expecting, holder, idle = EngineView(), busy(SLACK_TOKENS + 1), EngineView(2)
    expecting.note_sent(request("a"))
    holder.hints.note_held(["a"])
    assert choose_engine(request("a"), [expecting, holder, idle], unmakeable=("a",)) is holder
    expecting.note_sent(request(length=SLACK_TOKENS + 500, first=8))
    assert choose_engine(request("a"), [expecting, idle], unmakeable=("a",)) is expecting


def test_media_that_cannot_be_made_and_that_no_engine_holds_do_not_matter() -> None:
    holder, idle = busy(SLACK_TOKENS + 1), EngineView(1)
    holder.hints.note_held(["b"])
    assert choose_engine(request("a", "b"), [holder, idle], unmakeable=("a",)) is idle


def test_text_goes_to_the_least_busy_engine() -> None:
    engines = [busy(300), busy(200), busy(400)]
    assert choose_engine(request(), engines) is engines[1]


def test_a_prompt_follows_an_earlier_one_with_its_prefix_if_that_saves_work() -> None:
    seen, idle = EngineView(), EngineView()
    earlier = request(length=300)
    seen.note_sent(earlier)
    seen.note_ended(earlier.request_id)
    again = request(length=400)
    assert choose_engine(again, [idle, seen]) is seen
    seen.note_sent(request(length=290, first=8))
    assert choose_engine(again, [idle, seen]) is idle  # 256 cached tokens are not worth waiting for 300 others
    seen.forget_prefixes()
    assert choose_engine(again, [seen, idle]) is idle


def test_the_most_recently_sent_prefixes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "MAX_PREFIXES", 2)
    engine = EngineView()
    for first in (1, 2, 1, 3):
        engine.note_sent(request(length=SHORTEST_PREFIX, first=first))
    known = [engine.count_prefix_tokens(tuple(name_prefixes(request(length=100, first=each)))) for each in (1, 2, 3)]
    assert known == [SHORTEST_PREFIX, 0, SHORTEST_PREFIX]


def test_a_key_has_an_engine_of_its_own_in_every_frontend() -> None:
    def chosen(key: str, ranks: Sequence[int], salt: str | None = None) -> int:
        return choose_engine(request(salt=salt), [EngineView(rank) for rank in ranks], key).rank

    keys = [f"conversation {number}" for number in range(200)]
    places = {key: chosen(key, (0, 1, 2)) for key in keys}
    assert all(Counter(places.values())[rank] > 40 for rank in range(3))
    assert all(chosen(key, (2, 0, 1)) == place for key, place in places.items())
    # If an engine is missing, only its own keys move; equal keys of another tenant are placed independently.
    assert all(chosen(key, (0, 2)) == place for key, place in places.items() if place != 1)
    assert any(chosen(key, (0, 1, 2), salt="other") != place for key, place in places.items())


def test_idle_engines_are_chosen_by_content_alike_in_every_frontend() -> None:
    for requests in ([request(f"{number}") for number in range(200)], [request(first=first) for first in range(200)]):
        chosen = [choose_engine(each, [EngineView(rank) for rank in range(3)]).rank for each in requests]
        assert all(count > 40 for count in Counter(chosen).values())
        assert chosen == [choose_engine(each, [EngineView(rank) for rank in (2, 0, 1)]).rank for each in requests]


def test_a_key_ranks_below_held_media_and_above_load() -> None:
    engines = [EngineView(rank) for rank in range(2)]
    own = choose_engine(request(), engines, "k")
    [other] = [each for each in engines if each is not own]
    own.note_sent(request(length=500, first=8))
    assert choose_engine(request(), engines, "k") is own
    assert choose_engine(request(), engines) is choose_engine(request(), engines, "") is other
    other.hints.note_held(["a"])
    assert choose_engine(request("a"), engines, "k") is other
    own.note_sent(request(length=SLACK_TOKENS, first=8))
    assert choose_engine(request(), engines, "k") is other


def test_prefixes_are_equal_only_if_everything_they_depend_on_is() -> None:
    names = list(name_prefixes(request("a", length=300)))
    assert len(names) == 3  # 64, 128, 256
    assert list(name_prefixes(request("a", length=SHORTEST_PREFIX))) == names[:1]
    for other in (
        request("b", length=300),
        request("a", length=300, salt="s"),
        request("a", length=300, first=9),
    ):
        assert not set(names) & set(name_prefixes(other))


def test_tokens_after_a_prefix_do_not_change_it() -> None:
    text = request(length=300)
    picture = MediaItem("a", TokenSpan(SHORTEST_PREFIX, 4), Geometry(1, 1))
    names, others = (list(name_prefixes(each)) for each in (text, replace(text, media=(picture,))))
    assert [a == b for a, b in zip(names, others, strict=True)] == [True, False, False]


class AnyTraffic(RuleBasedStateMachine):
    """Three engines; each request is sent to the one chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = [EngineView() for _ in range(3)]
        self.sent: list[tuple[EngineView, EngineRequest]] = []

    @rule(media=st.lists(st.sampled_from("abcdef"), max_size=3), length=st.integers(12, 9000))
    def ask(self, media: list[str], length: int) -> None:
        asked = request(*media, length=length)
        chosen = choose_engine(asked, self.engines)
        least = min(each.num_tokens_in_flight for each in self.engines)
        assert chosen.num_tokens_in_flight <= 2 * least + SLACK_TOKENS
        most_held = max(
            each.count_held_media_tokens(asked)
            for each in self.engines
            if each.num_tokens_in_flight <= 2 * least + SLACK_TOKENS
        )
        assert chosen.count_held_media_tokens(asked) == most_held
        chosen.note_sent(asked)
        self.sent.append((chosen, asked))

    @rule(index=st.integers(0, 100))
    def end(self, index: int) -> None:
        if self.sent:
            engine, asked = self.sent.pop(index % len(self.sent))
            engine.hints.note_held(item.media_hash for item in asked.media)
            engine.note_ended(asked.request_id)
            engine.note_ended(asked.request_id)

    @rule(index=st.integers(0, 2), media=st.lists(st.sampled_from("abcdef"), max_size=3))
    def drop(self, index: int, media: list[str]) -> None:
        self.engines[index].hints.note_dropped(media)

    @invariant()
    def holds(self) -> None:
        for engine in self.engines:
            engine.check_invariants()
            assert engine.request_ids == {asked.request_id for its, asked in self.sent if its is engine}


AnyTraffic.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestAnyTraffic = AnyTraffic.TestCase
