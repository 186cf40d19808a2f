"""Engines come and go; whoever asks gets one answer, and pixels are made when somebody needs them and not before."""

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from keepsight.errors import EngineLostError, PictureError
from keepsight.frontend.engine_client import EngineClient, Outputs
from keepsight.frontend.make_pixels import MakePixels, PictureJob
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.prepare_request import PreparedRequest
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import (
    AbortRequest,
    EngineRequest,
    MediaArrived,
    MediaDropped,
    MediaHeld,
    MediaNeeded,
    Pixels,
    RequestFailed,
    ToEngine,
    TokenOutput,
)
from keepsight.sampling_params import SamplingParams

SOON = 20  # seconds, for what takes milliseconds


@dataclass
class Prepared:
    """A picture whose name begins with "bad" cannot be made."""

    engine_request: EngineRequest
    made: list[str] = field(default_factory=list)

    @property
    def makeable_media(self) -> tuple[str, ...]:
        return tuple(item.media_hash for item in self.engine_request.media)

    def group_by_picture(self, media_hashes: Collection[str]) -> list[tuple[str, ...]]:
        return [(each,) for each in media_hashes]

    def pixels_of(self, media_hashes: Collection[str], _make: MakePixels = PictureJob.run) -> dict[str, Pixels]:
        self.made += media_hashes
        if any(each.startswith("bad") for each in media_hashes):
            raise PictureError("image", "no picture")
        return {each: np.zeros((1, 1, 3), np.uint8) for each in media_hashes}

    def as_own(self, error: Exception, _media_hash: str) -> Exception:
        return error

    def learn(self, _made: object) -> None:
        pass

    def find_unknown(self, _media_hashes: object) -> None:
        return None


def prepared(request_id: str, *media: str) -> Prepared:
    items = tuple(
        MediaItem(each, TokenSpan(index, 1), Geometry(1, 1)) for index, each in enumerate(dict.fromkeys(media))
    )
    return Prepared(EngineRequest(request_id, tuple(range(8)), items, SamplingParams(max_tokens=4)))


class Engine:
    """Notes what it is told."""

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

    def hear(self, outputs: Outputs) -> None:
        self.outputs += outputs
        if isinstance(outputs[-1], Exception) or outputs[-1].finish_reason is not None:
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
def client(pool: MediaPool) -> EngineClient:
    return EngineClient(pool)


@pytest.fixture
def ask(client: EngineClient) -> Callable[[Prepared], Caller]:
    def ask(asked: Prepared) -> Caller:
        caller = Caller()
        client.submit(cast(PreparedRequest, asked), caller.hear)
        return caller

    return ask


Ask = Callable[[Prepared], Caller]


def last(request_id: str) -> TokenOutput:
    return TokenOutput(request_id, 0, 7, finish_reason="length")


def test_a_request_waits_for_the_first_engine(client: EngineClient, ask: Ask) -> None:
    caller, engine = ask(prepared("1")), Engine()
    client.connect(engine.send)
    assert [each.request_id for each in engine.of(EngineRequest)] == ["1"]
    client.receive([last("1")])
    assert caller.answer() == [last("1")]


def test_a_new_picture_comes_unasked_and_once(client: EngineClient, ask: Ask) -> None:
    engine = Engine()
    client.connect(engine.send)
    ask(first := prepared("1", "a"))
    ask(second := prepared("2", "a"))
    engine.await_pixels("a")
    assert [each.coming_media for each in engine.of(EngineRequest)] == [("a",), ()]
    assert first.made + second.made == ["a"]


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
    client.receive([MediaNeeded("1", ("a",))])
    engine.await_pixels("a")


def test_what_was_dropped_comes_unasked_again(client: EngineClient, ask: Ask) -> None:
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


def test_who_has_heard_nothing_is_answered_by_the_next_engine(client: EngineClient, ask: Ask) -> None:
    first, second = Engine(), Engine()
    client.connect(first.send)
    caller = ask(prepared("1", "a"))
    first.await_pixels("a")
    client.disconnect("it was killed")
    client.connect(second.send)
    second.await_pixels("a")
    assert second.of(EngineRequest)[0].coming_media == ("a",)
    assert client.num_resent == 1
    client.receive([last("1")])
    assert caller.answer() == [last("1")]


def test_who_has_heard_a_token_is_told_that_the_engine_was_lost(client: EngineClient, ask: Ask) -> None:
    client.connect(Engine().send)
    caller = ask(prepared("1"))
    client.receive([TokenOutput("1", 0, 7)])
    client.disconnect("it was killed")
    error = caller.answer()[-1]
    assert isinstance(error, EngineLostError)
    assert (error.status, str(error)) == (503, "it was killed")


def test_each_who_lost_the_engine_has_an_error_of_their_own(client: EngineClient, ask: Ask) -> None:
    client.connect(Engine().send)
    callers = [ask(prepared(name)) for name in ("1", "2")]
    client.receive([TokenOutput("1", 0, 7), TokenOutput("2", 0, 7)])
    client.disconnect("it was killed")
    first, second = (caller.answer()[-1] for caller in callers)
    assert first is not second


def test_a_request_that_two_engines_died_of_is_not_given_to_a_third(client: EngineClient, ask: Ask) -> None:
    caller = ask(prepared("1"))
    for _ in range(2):
        client.connect(Engine().send)
        client.disconnect("it was killed")
    assert isinstance(caller.answer()[0], EngineLostError)
    third = Engine()
    client.connect(third.send)
    assert not third.told


def test_when_no_engine_will_come_everyone_is_told_also_who_asks_later(client: EngineClient, ask: Ask) -> None:
    caller = ask(prepared("1"))
    client.give_up("the model does not load")
    assert isinstance(caller.answer()[0], EngineLostError)
    with pytest.raises(EngineLostError, match="the model does not load"):
        ask(prepared("2"))


def test_an_engine_s_refusal_is_the_last_that_is_heard(client: EngineClient, ask: Ask) -> None:
    client.connect(Engine().send)
    caller = ask(prepared("1"))
    client.receive([RequestFailed("1", "too long", is_refusal=True), last("1")])
    assert len(caller.answer()) == 2  # of one message; nothing of later ones
    client.receive([last("1")])
    assert len(caller.answer()) == 2
    assert not client.leave("1")


def test_a_caller_that_leaves_ends_the_request_everywhere(client: EngineClient, ask: Ask) -> None:
    engine = Engine()
    client.connect(engine.send)
    ask(prepared("1"))
    assert client.leave("1")
    assert engine.told[-1] == AbortRequest("1")
    assert not client.leave("1")
