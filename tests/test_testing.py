"""The channel itself; and, over it, that frontends and engine never drift apart, whatever is lost, late or given up."""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from keepsight.engine.engine_loop import EngineLoop
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import KeptPixels
from keepsight.errors import WireError
from keepsight.frontend.engine_client import EngineClient, Outputs
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.prepare_request import PreparedRequest
from keepsight.requests import (
    AbortRequest,
    CarriedPixels,
    EngineRequest,
    MediaArrived,
    ResetCaches,
    StoredPixels,
    ToEngine,
    TokenOutput,
)
from keepsight.scheduling.scheduler import Scheduler
from keepsight.testing import FakeRunner, MemoryChannel, answer_alone, pixels_like
from tests.scheduling.drive import END_IDS, make_config, make_request
from tests.scheduling.long_run import LONG_FACTOR

PICTURES = [f"picture {index}" for index in range(12)]


def test_messages_come_in_their_order() -> None:
    channel, received = MemoryChannel(), list[ToEngine]()
    sent: list[ToEngine] = [make_request("a", 3, "cat"), ResetCaches(prefix=True), AbortRequest("a")]
    assert all(channel.send_to_engine(message) for message in sent)
    assert not channel.is_empty
    channel.deliver_to_engine(received.append)
    assert received == sent
    assert channel.is_empty


def test_a_message_may_be_lost_or_overtaken() -> None:
    fates: dict[str, int | None] = {"a": 2, "b": None, "c": 0}
    channel = MemoryChannel(lambda message: fates[cast(AbortRequest, message).request_id])
    for request_id in fates:
        channel.send_to_engine(AbortRequest(request_id))
    for expected in (["c"], [], ["a"], []):
        received = list[ToEngine]()
        channel.deliver_to_engine(received.append)
        assert received == [AbortRequest(request_id) for request_id in expected]


def test_what_cannot_be_written_cannot_be_sent() -> None:
    with pytest.raises(WireError):
        MemoryChannel().send_to_engine(AbortRequest("\ud800"))


# Drift --------------------------------------------------------------------------------------------------------


@dataclass
class Prepared:
    engine_request: EngineRequest

    @property
    def makeable_media(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item.media_hash for item in self.engine_request.media))


@dataclass
class Pool:
    """Makes pixels at once, or says where they lie; that is wrong now and then, as handles get stale."""

    chance: random.Random
    num_stale: int = 0

    def make(
        self,
        _prepared: Prepared,
        media_hashes: Collection[str],
        deliver: Callable[[str, CarriedPixels], None],
        _fail: Callable[[Exception], None],
        *,
        inline: bool = False,
    ) -> None:
        for media_hash in media_hashes:
            is_stale = not inline and self.chance.random() < 0.1
            self.num_stale += is_stale
            deliver(media_hash, StoredPixels((4, 4, 3)) if is_stale else pixels_like(media_hash))

    def forget(self, request_id: str) -> None:
        pass

    def reset_cache(self) -> None:
        pass


@dataclass
class Asked:
    client: EngineClient
    request: EngineRequest
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def hear(self, outputs: Outputs) -> None:
        for output in outputs:
            assert isinstance(output, TokenOutput), output
            self.tokens.setdefault(output.choice, []).append(output.token_id)

    def expect_right_answer(self, max_model_len: int) -> None:
        choices = range(self.request.sampling_params.n)
        assert self.tokens == {each: answer_alone(self.request, each, END_IDS, max_model_len) for each in choices}


class House:
    """Two frontends and an engine that keeps pixels, each in its turn: nothing of it is left to chance but `chance`."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.config = make_config(num_blocks=60, num_pictures=3, max_num_seqs=4)
        self.scheduler, self.inbox = Scheduler(self.config, END_IDS), Inbox()
        self.runner = FakeRunner(60, 4, lambda: self.chance.random() < 0.7)
        self.channel = MemoryChannel(self.fate)
        self.source = KeptPixels(4 * pixels_like("any").nbytes)
        self.loop = EngineLoop(self.scheduler, self.runner, self.inbox, self.channel.send_to_frontends, self.source)
        self.pools = [Pool(self.chance) for _ in range(2)]
        self.clients = [EngineClient(cast(MediaPool, pool)) for pool in self.pools]
        for client in self.clients:
            client.connect(self.channel.send_to_engine)
        self.lost: set[str] = set()
        self.running: list[Asked] = []
        self.num_answered = 0

    def fate(self, message: ToEngine) -> int | None:
        """Requests come before their media, as on any real channel; all else is late as it likes."""
        if isinstance(message, EngineRequest):
            if self.chance.random() < 0.05:
                self.lost.add(message.request_id)
                return None
            return 0
        return self.chance.choice([0, 0, 1, 3]) if isinstance(message, MediaArrived | AbortRequest) else 0

    def ask(self, number: int) -> None:
        place = self.chance.randrange(2)
        parts: list[Any] = [self.chance.randrange(1, 9)]
        parts += self.chance.choices(PICTURES, k=self.chance.randrange(4))
        options = {"n": self.chance.choice([1, 1, 2]), "max_tokens": self.chance.randrange(1, 8)}
        asked = Asked(self.clients[place], make_request(f"{place}-{number}", *parts, 2, **options))
        asked.client.submit(cast(PreparedRequest, Prepared(asked.request)), asked.hear)
        self.running.append(asked)
        if asked.request.request_id in self.lost:
            self.leave(asked)

    def leave(self, asked: Asked) -> None:
        asked.client.leave(asked.request.request_id)
        self.running.remove(asked)

    def turn(self) -> None:
        self.channel.deliver_to_engine(self.inbox.try_put)
        self.inbox.wake()
        self.loop.step()
        self.scheduler.check_invariants()
        self.channel.deliver_to_frontends(*(client.receive for client in self.clients))
        ended = [asked for asked in self.running if asked.request.request_id not in asked.client._callers]
        for asked in ended:
            asked.expect_right_answer(self.config.scheduler.max_model_len)
            self.running.remove(asked)
            self.num_answered += 1

    def disturb(self) -> None:
        if self.running and self.chance.random() < 0.05:
            self.leave(self.chance.choice(self.running))
        if self.chance.random() < 0.01:
            kinds = {name: self.chance.random() < 0.5 for name in ("prefix", "encoder")}
            self.channel.send_to_engine(ResetCaches(**kinds, processor=self.chance.random() < 0.5))

    def settle(self) -> None:
        for _ in range(1000):
            if not (self.running or self.runner.is_busy or self.scheduler.has_requests) and self.channel.is_empty:
                break
            self.turn()
        self.turn()


@pytest.mark.parametrize("seed", range(2))
def test_frontends_and_engine_never_drift_apart(seed: int) -> None:
    house, num_requests = House(seed), 150 * LONG_FACTOR
    for number in range(num_requests):
        house.ask(number)
        house.disturb()
        for _ in range(house.chance.randrange(4)):
            house.turn()
        while len(house.running) > 12:
            house.turn()
    house.settle()
    assert not house.running, "somebody waits for ever"
    assert house.num_answered > num_requests * 0.6
    assert house.lost
    assert all(pool.num_stale for pool in house.pools)
    assert house.runner.num_held_pixels == 0
    assert house.runner.num_sequences == 0
    held = {each for each in PICTURES if each in house.scheduler.holdings}
    for client in house.clients:
        assert set(client._hints._held) == held
        assert not client._hints._promised
        client._hints.check_invariants()
