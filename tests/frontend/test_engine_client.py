"""Engines come and go; each request is answered once, and pixels are made only when an engine needs them."""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keepsight.errors import (
    EngineLostError,
    InvalidArgumentError,
    PictureError,
    RequestFailedError,
    SlowReaderError,
    WireError,
)
from keepsight.frontend import unread_outputs
from keepsight.frontend.caller import ConnectedEngine, Outputs
from keepsight.frontend.choose_engine import SLACK_TOKENS
from keepsight.frontend.engine_client import SAME_CAUSE_SECONDS, EngineClient
from keepsight.frontend.media_hints import MAX_PROMISES
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixels.pixel_cache import LocalCache
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.unread_outputs import MAX_PAUSE_SECONDS
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.observe.account import RequestAccount
from keepsight.observe.counters import Counters
from keepsight.observe.request_observer import ANSWER_TOKENS, ENDS, PROMPT_TOKENS, WAITING, RequestObserver
from keepsight.requests import (
    AbortRequest,
    EngineRequest,
    FinishReason,
    FromEngine,
    MediaArrived,
    MediaDropped,
    MediaHeld,
    MediaNeeded,
    Pixels,
    RequestBegun,
    RequestFailed,
    ToEngine,
    TokenOutput,
)
from keepsight.sampling_params import SamplingParams
from keepsight.testing import pixels_like
from tests.clock import Clock
from tests.counted import read_counters
from tests.made_up_request import MadeUpRequest

SOON = 20  # seconds; normally takes milliseconds


@dataclass
class Prepared(MadeUpRequest):
    """A picture whose name begins with "bad" cannot be made."""

    made: list[str] = field(default_factory=list)

    def make(self, media_hash: str) -> Pixels:
        self.made.append(media_hash)
        if media_hash.startswith("bad"):
            raise PictureError("image", "no picture")
        return super().make(media_hash)


class Cropped(Prepared):
    """Media hashes that begin with the same letter are parts of one picture."""

    def group_by_picture(self, media_hashes: Collection[str]) -> list[tuple[str, ...]]:
        letters = dict.fromkeys(each[0] for each in media_hashes)
        return [tuple(each for each in media_hashes if each[0] == letter) for letter in letters]


def prepared(request_id: str, *media: str) -> Prepared:
    items = tuple(
        MediaItem(each, TokenSpan(index, 1), Geometry(1, 1)) for index, each in enumerate(dict.fromkeys(media))
    )
    return Prepared(EngineRequest(request_id, tuple(range(8)), items, SamplingParams(max_tokens=4)))


class Engine:
    """Records the messages it is sent."""

    def __init__(self) -> None:
        self.told: list[ToEngine] = []
        self.changed = threading.Condition()

    def send(self, message: ToEngine) -> bool:
        with self.changed:
            self.told.append(message)
            self.changed.notify()
        return True

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.told if isinstance(each, kind)]

    def await_pixels(self, *media_hashes: str) -> None:
        with self.changed:
            arrived = self.changed.wait_for(
                lambda: [each.media_hash for each in self.of(MediaArrived)] == list(media_hashes), SOON
            )
        assert arrived, self.told


class Caller:
    def __init__(self) -> None:
        self.outputs: Outputs = []
        self.ended = threading.Event()
        self.num_ends = 0

    def hear(self, outputs: Outputs) -> None:
        self.outputs += outputs
        if isinstance(outputs[-1], Exception) or outputs[-1].finish_reason is not None:
            self.num_ends += 1
            self.ended.set()

    def answer(self) -> Outputs:
        assert self.ended.wait(SOON)
        return self.outputs


@pytest.fixture
def pool() -> Iterator[MediaPool]:
    pool = MediaPool(1)
    yield pool
    pool.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(pool: MediaPool, clock: Clock) -> EngineClient:
    return EngineClient(pool, clock=clock)


@pytest.fixture
def ask(client: EngineClient) -> Callable[[Prepared], Caller]:
    def ask(asked: Prepared) -> Caller:
        caller = Caller()
        client.submit(cast(PreparedRequest, asked), caller.hear)
        return caller

    return ask


Ask = Callable[[Prepared], Caller]


def test_a_request_that_cannot_be_encoded_fails_and_is_forgotten(client: EngineClient, ask: Ask) -> None:
    def refuse(_: ToEngine) -> bool:
        raise WireError("an unpaired surrogate is not text")

    client.connect(refuse)
    with pytest.raises(WireError, match="surrogate"):
        ask(asked := prepared("0"))
    assert asked.account.end_reason == "error"
    assert not client.leave("0")
    client.check_invariants()


def test_a_request_whose_pixels_cannot_be_requested_fails_and_leaves_nothing(
    client: EngineClient, pool: MediaPool, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    engine = Engine()
    client.connect(engine.send)
    for owner, name in ((pool._pictures.threads, "submit"), (pool._cache, "touch")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            [error] = ask(prepared(name, "cat", "dog")).answer()
            assert str(error) == "can't start new thread"
        assert AbortRequest(name) in engine.told
        assert not client.leave(name)
        assert not pool._waiters
        client.check_invariants()
        pool.check_invariants()
    ask(prepared("later", "cat", "dog"))
    engine.await_pixels("cat", "dog")


def test_a_request_that_cannot_be_sent_for_lack_of_memory_leaves_nothing(client: EngineClient, ask: Ask) -> None:
    def fail(_: ToEngine) -> bool:
        raise MemoryError

    client.connect(fail)
    with pytest.raises(MemoryError):
        ask(prepared("0"))
    assert not client.leave("0")
    client.check_invariants()


def test_pixels_that_no_message_can_hold_are_a_refusal_with_the_reason(client: EngineClient, ask: Ask) -> None:
    told: list[ToEngine] = []

    def send(message: ToEngine) -> bool:
        if isinstance(message, MediaArrived):
            raise WireError("pixels of 9 bytes; at most 8")
        told.append(message)
        return True

    client.connect(send)
    [error] = ask(prepared("0", "cat")).answer()
    assert isinstance(error, RequestFailedError)
    assert (error.status, str(error)) == (400, "media cannot be sent: pixels of 9 bytes; at most 8")
    assert told[1:] == [AbortRequest("0")]
    client.check_invariants()


def test_a_request_whose_pixels_cannot_be_sent_fails(client: EngineClient, ask: Ask) -> None:
    def send(message: ToEngine) -> bool:
        if isinstance(message, MediaArrived):
            raise MemoryError("no room for a copy")
        return True

    client.connect(send)
    [error] = ask(prepared("0", "cat")).answer()
    assert isinstance(error, MemoryError)
    client.check_invariants()


def last(request_id: str) -> TokenOutput:
    return TokenOutput(request_id, 0, 7, finish_reason="length")


def test_a_request_waits_for_the_first_engine(client: EngineClient, ask: Ask) -> None:
    caller, engine = ask(prepared("1")), Engine()
    client.connect(engine.send)
    assert [each.request_id for each in engine.of(EngineRequest)] == ["1"]
    client.receive([last("1")])
    assert caller.answer() == [last("1")]


def test_a_new_picture_is_sent_unrequested_and_once(client: EngineClient, ask: Ask) -> None:
    engine = Engine()
    client.connect(engine.send)
    ask(first := prepared("1", "a"))
    ask(second := prepared("2", "a"))
    engine.await_pixels("a")
    assert [each.coming_media for each in engine.of(EngineRequest)] == [("a",), ()]
    assert first.made + second.made == ["a"]


def test_a_picture_is_promised_with_all_its_parts_or_not_at_all(client: EngineClient, ask: Ask) -> None:
    engine = Engine()
    client.connect(engine.send)
    parts = [f"{picture}{part}" for picture in "abcd" for part in range(5)]
    assert len(parts[:15]) < MAX_PROMISES < len(parts)
    ask(Cropped(prepared("1", *parts).engine_request))
    [sent] = engine.of(EngineRequest)
    assert sent.coming_media == tuple(parts[:15])


def test_a_picture_that_the_engine_holds_is_not_opened(client: EngineClient, ask: Ask) -> None:
    engine = Engine()
    client.connect(engine.send)
    client.receive([MediaHeld(("a",))])
    ask(asked := prepared("1", "a"))
    assert engine.of(EngineRequest)[0].coming_media == ()
    assert not asked.made


def test_a_wrong_hint_costs_a_round_trip(client: EngineClient, ask: Ask) -> None:
    engine = Engine()
    client.connect(engine.send)
    client.receive([MediaHeld(("a",))])
    ask(prepared("1", "a"))
    assert [each.coming_media for each in engine.of(EngineRequest)] == [()]
    client.receive([MediaNeeded("1", ("a",))])
    engine.await_pixels("a")


def test_a_dropped_picture_is_sent_unrequested_again(client: EngineClient, ask: Ask) -> None:
    engine = Engine()
    client.connect(engine.send)
    client.receive([MediaHeld(("a",)), MediaDropped(("a",))])
    ask(prepared("1", "a"))
    engine.await_pixels("a")


def test_a_promise_that_cannot_be_kept_fails_the_request_and_frees_the_engine(client: EngineClient, ask: Ask) -> None:
    engine = Engine()
    client.connect(engine.send)
    [error] = ask(prepared("1", "bad")).answer()
    assert isinstance(error, PictureError)
    assert engine.of(AbortRequest) == [AbortRequest("1")]


def test_a_request_without_tokens_so_far_is_moved_to_the_next_engine(client: EngineClient, ask: Ask) -> None:
    first, second = Engine(), Engine()
    client.connect(first.send)
    caller = ask(prepared("1", "a"))
    first.await_pixels("a")
    client.disconnect("it was killed")
    client.connect(second.send)
    second.await_pixels("a")
    assert [each.coming_media for each in second.of(EngineRequest)] == [("a",)]
    client.receive([last("1")])
    assert caller.answer() == [last("1")]


def test_a_request_with_tokens_fails_when_its_engine_is_lost(client: EngineClient, ask: Ask) -> None:
    client.connect(Engine().send)
    caller = ask(prepared("1"))
    client.receive([TokenOutput("1", 0, 7)])
    client.disconnect("it was killed")
    error = caller.answer()[-1]
    assert isinstance(error, EngineLostError)
    assert (error.status, str(error), error.had_begun) == (503, "it was killed", True)


def test_the_wait_includes_the_time_for_an_engine_and_its_current_step(client: EngineClient, ask: Ask) -> None:
    asked = prepared("1")
    began = time.monotonic()
    ask(asked)
    handed_over = time.monotonic()
    client.connect(Engine().send)
    arrived = handed_over + 1
    client.receive([RequestBegun("1", arrived, arrived + 1, arrived + 2, ())])
    [wait] = (each for each in asked.account.spans if each.stage == "wait")
    assert began <= wait.began <= handed_over
    assert wait.ended == arrived + 1


def test_each_request_that_lost_its_engine_has_its_own_error(client: EngineClient, ask: Ask) -> None:
    client.connect(Engine().send)
    callers = [ask(prepared(name)) for name in ("1", "2")]
    client.receive([TokenOutput("1", 0, 7), TokenOutput("2", 0, 7)])
    client.disconnect("it was killed")
    first, second = (caller.answer()[-1] for caller in callers)
    assert first is not second


def test_a_request_that_lost_two_engines_is_not_sent_to_a_third(client: EngineClient, clock: Clock, ask: Ask) -> None:
    caller = ask(prepared("1"))
    for _ in range(2):
        client.connect(Engine().send)
        client.disconnect("it was killed")
        clock.now += 1.5
    assert isinstance(caller.answer()[0], EngineLostError)
    third = Engine()
    client.connect(third.send)
    assert not third.told


def test_when_no_engine_will_come_all_requests_fail_also_later_ones(client: EngineClient, ask: Ask) -> None:
    caller = ask(prepared("1"))
    client.give_up("the model does not load")
    assert isinstance(caller.answer()[0], EngineLostError)
    with pytest.raises(EngineLostError, match="the model does not load"):
        ask(prepared("2"))


def test_nothing_is_delivered_after_an_engine_s_refusal(client: EngineClient, ask: Ask) -> None:
    client.connect(Engine().send)
    caller = ask(prepared("1"))
    client.receive([RequestFailed("1", "too long", is_refusal=True), last("1")])
    assert len(caller.answer()) == 2  # both from one message; later ones are dropped
    client.receive([last("1")])
    assert len(caller.answer()) == 2
    assert not client.leave("1")


def test_a_refusal_s_field_is_passed_to_the_caller(client: EngineClient, ask: Ask) -> None:
    client.connect(Engine().send)
    caller = ask(prepared("1"))
    client.receive([RequestFailed("1", "too large", is_refusal=True, field="structured_outputs.regex")])
    [error] = caller.answer()
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.message) == ("structured_outputs.regex", "too large")


def test_a_caller_that_leaves_ends_the_request_everywhere(client: EngineClient, ask: Ask) -> None:
    engine = Engine()
    client.connect(engine.send)
    ask(prepared("1"))
    assert client.leave("1")
    assert engine.told[-1] == AbortRequest("1")
    assert not client.leave("1")


def test_reading_buffered_tokens_lets_other_tasks_run_in_between(client: EngineClient) -> None:
    """Else a stream whose client stopped reading and then left would first be written to the end, in one turn."""
    client.connect(Engine().send)

    async def take_late() -> list[str]:
        tokens = client.generate(cast(PreparedRequest, prepared("1")))
        reading = asyncio.create_task(anext(tokens))
        await asyncio.sleep(0)
        for _ in range(4):
            client.receive([TokenOutput("1", 0, 7)])
        await reading
        turns: list[str] = []
        asyncio.get_running_loop().call_soon(turns.append, "another's")
        for _ in range(3):
            await anext(tokens)
            turns.append("taken")
        await tokens.aclose()
        return turns

    assert "another's" in asyncio.run(take_late())[:-1]


async def read_behind(client: EngineClient, clock: Clock, *, pause: float) -> list[Any]:
    """Read one token, wait, while the others come, for `pause` seconds, and read on; return what was read."""
    tokens = client.generate(cast(PreparedRequest, prepared("1")))
    reading = asyncio.create_task(anext(tokens))
    await asyncio.sleep(0)
    client.receive([TokenOutput("1", 0, 0)])
    read: list[Any] = [(await reading).token_id]
    for token_id in range(1, MAX_UNREAD + 2):
        clock.now += pause / MAX_UNREAD
        client.receive([TokenOutput("1", 0, token_id)])
        await asyncio.sleep(0)
    try:
        read += [(await anext(tokens)).token_id for _ in range(MAX_UNREAD + 1)]
    except SlowReaderError as error:
        read.append(error.code)
    await tokens.aclose()
    return read


MAX_UNREAD = 8


def test_a_reader_that_waits_for_its_client_is_cut_off_when_far_behind(
    client: EngineClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_outputs, "MAX_UNREAD_PARTS", MAX_UNREAD)
    engine = Engine()
    client.connect(engine.send)
    assert asyncio.run(read_behind(client, clock, pause=2 * MAX_PAUSE_SECONDS)) == [0, "slow_reader"]
    assert engine.of(AbortRequest) == [AbortRequest("1")]
    client.check_invariants()


def test_a_reader_that_is_far_behind_for_a_moment_is_not_cut_off(
    client: EngineClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_outputs, "MAX_UNREAD_PARTS", MAX_UNREAD)
    client.connect(Engine().send)
    assert asyncio.run(read_behind(client, clock, pause=MAX_PAUSE_SECONDS / 2)) == list(range(MAX_UNREAD + 2))


def test_outputs_that_come_all_at_once_to_a_waiting_reader_do_not_cut_it_off(
    client: EngineClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_outputs, "MAX_UNREAD_PARTS", MAX_UNREAD)
    client.connect(Engine().send)

    async def read_burst() -> list[int]:
        tokens = client.generate(cast(PreparedRequest, prepared("1")))
        reading = asyncio.create_task(anext(tokens))
        await asyncio.sleep(0)
        clock.now += 2 * MAX_PAUSE_SECONDS
        client.receive([TokenOutput("1", 0, token_id) for token_id in range(2 * MAX_UNREAD)])
        read = [(await reading).token_id] + [(await anext(tokens)).token_id for _ in range(2 * MAX_UNREAD - 1)]
        await tokens.aclose()
        return read

    assert asyncio.run(read_burst()) == list(range(2 * MAX_UNREAD))


def asked_for_two() -> Prepared:
    request = prepared("1").engine_request
    return Prepared(replace(request, sampling_params=SamplingParams(max_tokens=4, n=2)))


def choice(number: int, finish_reason: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("1", number, 7, finish_reason=finish_reason)


@pytest.mark.parametrize(
    ("heard", "reason"),
    [
        ([choice(0), choice(1)], "abort"),
        ([choice(0, "stop"), choice(1)], "abort"),
        ([choice(0, "stop"), choice(1, "length")], "length"),
        ([choice(0, "length"), choice(1, "stop")], "stop"),
        ([choice(0, "stop"), RequestFailed("1", "broken")], "error"),
    ],
)
def test_a_request_of_two_choices_ends_as_the_last_of_them_or_as_its_client_leaves(
    client: EngineClient, ask: Ask, heard: list[FromEngine], reason: str
) -> None:
    client.connect(Engine().send)
    ask(asked := asked_for_two())
    for output in heard:
        client.receive([output])
    client.leave("1")
    assert asked.account.end_reason == reason


def test_stopping_one_choice_does_not_end_the_other(client: EngineClient, ask: Ask) -> None:
    client.connect(Engine().send)
    ask(asked := asked_for_two())
    client.note_read("1", 0, "stop")
    client.leave("1")
    assert asked.account.end_reason == "abort"


@pytest.mark.parametrize("is_together", [False, True])
def test_an_account_counts_as_cached_what_was_for_all_choices(
    client: EngineClient, ask: Ask, is_together: bool
) -> None:
    client.connect(Engine().send)
    ask(asked := asked_for_two())
    # The first choice computes the whole prompt, for its log-probabilities, and may be the last to begin.
    tokens = [TokenOutput("1", number, 7, num_cached_tokens=num_cached) for number, num_cached in ((1, 20), (0, 0))]
    for outputs in [tokens] if is_together else ([each] for each in tokens):
        client.receive(outputs)
    assert asked.account.num_cached_tokens == 0


# Stop strings: only the reader of the answer finds where it ends --------------------------------------------------


def asked_with_stop_string(num_choices: int = 2) -> Prepared:
    request = prepared("1").engine_request
    return Prepared(replace(request, sampling_params=SamplingParams(max_tokens=4, n=num_choices, stop="x")))


def count_tokens(counters: Counters) -> float:
    return counters.numbers()[ANSWER_TOKENS]


def test_an_end_is_read_while_the_engine_s_end_is_being_noted(pool: MediaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    client, note_ended = EngineClient(pool, RequestObserver(counters)), ConnectedEngine.note_ended
    client.connect(Engine().send)
    client.submit(cast(PreparedRequest, asked_with_stop_string(1)), Caller().hear)
    client.receive([choice(0)])

    def read_meanwhile(engine: ConnectedEngine, request_id: str) -> None:
        client.note_read("1", 0, "stop")
        note_ended(engine, request_id)

    monkeypatch.setattr(ConnectedEngine, "note_ended", read_meanwhile)
    client.receive([choice(0, "length")])
    assert (count_tokens(counters), counters.numbers()[ENDS["stop"]]) == (1, 1)
    assert not client._unread


def test_ends_are_reported_without_the_lock(pool: MediaPool) -> None:
    held = []

    class Observer(RequestObserver):
        def note_end(self, account: RequestAccount, reason: str) -> None:
            held.append(client._lock._is_owned())  # type: ignore[attr-defined]
            super().note_end(account, reason)

    client = EngineClient(pool, Observer())
    client.connect(Engine().send)
    client.submit(cast(PreparedRequest, prepared("1")), Caller().hear)
    client.receive([TokenOutput("1", 0, 7)])
    client.disconnect("killed")
    assert held == [False]


def test_only_tokens_that_are_part_of_the_answer_are_counted(pool: MediaPool) -> None:
    counters, engine, caller = Counters(), Engine(), Caller()
    client, asked = EngineClient(pool, RequestObserver(counters)), asked_with_stop_string()
    client.connect(engine.send)
    client.submit(cast(PreparedRequest, asked), caller.hear)
    client.receive([choice(0), choice(0), choice(1)])
    client.note_read("1", 0, "stop")  # the second token, which came with the first, is behind the stop string
    client.note_read("1", 1, None)
    assert engine.of(AbortRequest) == [AbortRequest("1", 0)]
    client.receive([choice(0), choice(1, "length")])  # a step had begun before the engine read the abort
    client.note_read("1", 1, "length")
    assert [each.choice for each in caller.outputs if isinstance(each, TokenOutput)] == [0, 0, 1, 1]
    assert (asked.account.num_tokens, count_tokens(counters)) == (3, 3)
    assert counters.numbers()[PROMPT_TOKENS] == 8
    assert not client.leave("1")


@pytest.mark.parametrize(("last", "reason"), [("stop", "stop"), ("length", "length")])
def test_a_request_ends_as_its_reader_says_and_not_as_its_engine_does(
    client: EngineClient, ask: Ask, last: FinishReason, reason: str
) -> None:
    client.connect(Engine().send)
    ask(asked := asked_with_stop_string(1))
    client.receive([choice(0, "length")])
    assert asked.account.end_reason is None
    client.note_read("1", 0, last)
    client.leave("1")
    assert asked.account.end_reason == reason


@pytest.mark.parametrize(
    ("heard", "reason"),
    [
        ([choice(0), choice(1)], "abort"),
        ([choice(0, "stop"), choice(1, "length")], "length"),
        ([choice(0), RequestFailed("1", "broken")], "error"),
    ],
)
def test_a_reader_that_leaves_before_the_end_ends_the_request_as_it_ended_for_the_engine(
    pool: MediaPool, heard: list[FromEngine], reason: str
) -> None:
    counters, asked = Counters(), asked_with_stop_string()
    client = EngineClient(pool, RequestObserver(counters))
    client.connect(Engine().send)
    client.submit(cast(PreparedRequest, asked), Caller().hear)
    client.receive(heard)
    client.note_read("1", 0, None)
    client.leave("1")
    client.leave("1")
    assert asked.account.end_reason == reason
    assert count_tokens(counters) == sum(counters.numbers()[each] for each in ENDS.values()) == 1


# Several engines --------------------------------------------------------------------------------------------------


def connect_two(client: EngineClient) -> list[Engine]:
    engines = [Engine(), Engine()]
    for rank, engine in enumerate(engines):
        client.connect(engine.send, rank)
    return engines


def test_requests_pixels_aborts_and_stops_go_to_the_engine_with_the_picture(client: EngineClient, ask: Ask) -> None:
    other, holder = connect_two(client)
    client.receive([MediaHeld(("a",))], rank=1)
    ask(prepared("1", "a"))
    client.receive([MediaNeeded("1", ("a",))], rank=1)
    holder.await_pixels("a")
    client.note_read("1", 0, "stop")
    assert [type(each) for each in holder.told] == [EngineRequest, MediaArrived, AbortRequest]
    assert not other.told


@pytest.mark.parametrize("is_kept_here", [False, True])
def test_a_picture_not_sent_goes_to_a_far_busier_engine_that_holds_it_unless_its_pixels_are_kept_here(
    is_kept_here: bool,
) -> None:
    cache = LocalCache(1000)
    pool = MediaPool(1, cache)
    client = EngineClient(pool)
    busy, idle = connect_two(client)
    client.receive([MediaHeld(("a",))], rank=0)
    long = EngineRequest("long", (5,) * (SLACK_TOKENS + 1), prepared("x", "a").engine_request.media, SamplingParams())
    client.submit(cast(PreparedRequest, Prepared(long)), Caller().hear)
    if is_kept_here:
        cache.put("a", pixels_like("a"))
    asked = prepared("1", "a")
    asked.engine_request = replace(asked.engine_request, unsent_media=("a",))
    client.submit(cast(PreparedRequest, asked), Caller().hear)
    assert [each.request_id for each in idle.of(EngineRequest)] == (["1"] if is_kept_here else [])
    assert [each.request_id for each in busy.of(EngineRequest)] == ["long", "1"][: 2 - is_kept_here]
    client.close()


def test_requests_for_one_new_picture_share_an_engine_and_others_go_to_the_idle_one(
    client: EngineClient, ask: Ask
) -> None:
    engines = connect_two(client)
    for number in range(5):
        ask(prepared(f"a{number}", "a"))
    ask(prepared("b", "b"))
    counts = [len(engine.of(EngineRequest)) for engine in engines]
    assert sorted(counts) == [1, 5]
    engines[counts.index(5)].await_pixels("a")
    engines[counts.index(1)].await_pixels("b")


def test_requests_of_an_engine_that_dies_go_to_the_other_with_their_pictures(client: EngineClient, ask: Ask) -> None:
    _, second = connect_two(client)
    client.receive([MediaHeld(("a",))], rank=0)
    waiting, begun = ask(prepared("1", "a")), ask(prepared("2", "a"))
    client.receive([TokenOutput("2", 0, 7)], rank=0)
    client.disconnect("it was killed", rank=0)
    second.await_pixels("a")
    assert [each.request_id for each in second.of(EngineRequest)] == ["1"]
    assert isinstance(begun.answer()[-1], EngineLostError)
    client.receive([last("1")], rank=1)
    assert waiting.answer() == [last("1")]
    assert client.num_engines
    client.check_invariants()


def test_a_silent_engine_keeps_its_requests_but_gets_no_more_until_it_is_heard(client: EngineClient, ask: Ask) -> None:
    silent, other = connect_two(client)
    client.receive([MediaHeld(("a",))], rank=0)
    caller = ask(prepared("1", "a"))
    client.note_silence(0, is_silent=True)
    client.note_silence(7, is_silent=True)  # one that is lost already
    assert (client.num_engines, client.num_silent_engines) == (2, 1)
    ask(prepared("2", "a"))
    client.note_silence(0, is_silent=False)
    ask(prepared("3", "a"))
    assert [[each.request_id for each in engine.of(EngineRequest)] for engine in (silent, other)] == [["1", "3"], ["2"]]
    client.receive([last("1")], rank=0)
    assert caller.answer() == [last("1")]
    assert client.num_silent_engines == 0


def test_a_request_that_loses_two_engines_at_once_is_answered_by_the_next(
    client: EngineClient, clock: Clock, ask: Ask
) -> None:
    connect_two(client)
    caller = ask(prepared("1"))
    for rank in range(2):
        client.disconnect("out of memory", rank)
        clock.now += 0.5
    client.connect(Engine().send)
    client.receive([last("1")])
    assert caller.answer() == [last("1")]


class ManyEngines(RuleBasedStateMachine):
    """Engines of three ranks come and go and answer in any order; each request ends exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = MediaPool(1)
        self.clock = Clock()
        self.counters = Counters()
        self.client = EngineClient(self.pool, RequestObserver(self.counters), clock=self.clock)
        self.engines: dict[int, Engine] = {}
        self.callers: dict[str, Caller] = {}
        self.has_left: set[str] = set()
        # Requests with stop strings whose end has not been read.
        self.unread: set[str] = set()
        # Requests that have begun, and when each lost its first engine.
        self.begun: set[str] = set()
        self.first_losses: dict[str, float] = {}
        # Dead engines, and how many messages each had been sent by then.
        self.graves: list[tuple[Engine, int]] = []

    def teardown(self) -> None:
        self.client.close()
        for request_id, caller in self.callers.items():
            if request_id not in self.has_left:
                assert caller.num_ends == 1
                self.client.leave(request_id)  # as its reader does in any case
        assert not self.client._unread

    @rule(media=st.lists(st.sampled_from("abcd"), max_size=2, unique=True), stop=st.sampled_from(["", "x"]))
    def ask(self, media: list[str], stop: str) -> None:
        request_id = f"{len(self.callers)}"
        caller, asked = Caller(), prepared(request_id, *media)
        params = SamplingParams(max_tokens=4, stop=stop or ())
        asked.engine_request = replace(asked.engine_request, sampling_params=params)
        self.callers[request_id] = caller
        if stop:
            self.unread.add(request_id)
        self.client.submit(cast(PreparedRequest, asked), caller.hear)

    @precondition(lambda self: self.unread)
    @rule(data=st.data(), reason=st.sampled_from([None, "stop"]))
    def read(self, data: st.DataObject, reason: FinishReason | None) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.unread)))
        self.client.note_read(request_id, 0, reason)
        if reason is not None:
            self.unread.remove(request_id)
            assert request_id not in self.client._unread
            if request_id in self.running():
                self.has_left.add(request_id)

    @rule(rank=st.integers(0, 2))
    def come(self, rank: int) -> None:
        if rank not in self.engines:
            self.engines[rank] = Engine()
            self.client.connect(self.engines[rank].send, rank)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 0.6, 3.0]))
    def die(self, data: st.DataObject, seconds: float) -> None:
        self.clock.now += seconds
        rank = data.draw(st.sampled_from(sorted(self.engines)))
        engine, others = self.engines.pop(rank), set(self.running())
        theirs = self.asked_of(engine)
        self.client.disconnect("killed", rank)
        waited = {each: self.clock.now - self.first_losses.setdefault(each, self.clock.now) for each in theirs}
        ended = {each for each in theirs if each in self.begun or waited[each] > SAME_CAUSE_SECONDS}
        assert others - set(self.running()) == ended
        self.graves.append((engine, len(engine.of(EngineRequest))))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), ends=st.booleans(), holds=st.booleans())
    def answer(self, data: st.DataObject, ends: bool, holds: bool) -> None:
        rank = data.draw(st.sampled_from(sorted(self.engines)))
        asked = self.asked_of(self.engines[rank])
        if asked:
            request_id = data.draw(st.sampled_from(sorted(asked)))
            hints: list[Any] = [MediaHeld(tuple(each.media_hash for each in asked[request_id].media))] if holds else []
            token = last(request_id) if ends else TokenOutput(request_id, 0, 7)
            self.begun.add(request_id)
            self.client.receive([*hints, token], rank)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.running()))
        assert self.client.leave(request_id)
        self.has_left.add(request_id)
        self.unread.discard(request_id)

    def running(self) -> list[str]:
        return [each for each in self.callers if not self.callers[each].num_ends and each not in self.has_left]

    def asked_of(self, engine: Engine) -> dict[str, EngineRequest]:
        """Return the requests that the engine still has to answer, each as last sent."""
        running = self.running()
        return {each.request_id: each for each in engine.of(EngineRequest) if each.request_id in running}

    @invariant()
    def each_request_that_runs_is_with_one_engine_that_lives(self) -> None:
        self.client.check_invariants()
        for request_id in self.running():
            num_asked = sum(request_id in self.asked_of(engine) for engine in self.engines.values())
            assert num_asked == (1 if self.engines else 0), request_id
        assert read_counters(self.counters, WAITING) == [0 if self.engines else len(self.running())]
        for engine, num_asked in self.graves:
            assert len(engine.of(EngineRequest)) == num_asked, "asked when it was dead"
        assert all(caller.num_ends <= 1 for caller in self.callers.values())


ManyEngines.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestManyEngines = ManyEngines.TestCase
