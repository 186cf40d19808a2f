"""Whole engines over tiers: one finds what another encoded, and every answer is right whatever happens to a tier."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import cast

import pytest

from keepsight.engine.embedding_tiers import EmbeddingFormat, EmbeddingTiers
from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import PixelSource
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.observe.counters import Counters
from keepsight.requests import ResetCaches, TokenOutput
from keepsight.testing import FakeRunner, expected_answer
from keepsight.tiers.entry_key import entry_key
from keepsight.tiers.redis_tier import RedisTier
from keepsight.tiers.tier import Tier
from keepsight.tiers.tiered_store import TieredStore
from tests.engine.made_up_engine import make_engine
from tests.engine.test_engine_meter import Engine as SteppedEngine
from tests.engine.test_engine_meter import in_host_memory
from tests.made_up_request import MadeUpRequest
from tests.scheduling.drive import END_IDS, TOKENS_PER_PICTURE, make_config, make_request
from tests.tiers.fake_tier import FakeTier
from tests.tiers.redis_servers import REAL, real_server

SOON = 20
needs_redis = pytest.mark.skipif(REAL is None, reason="NO REAL REDIS: redis-server is not installed")


class Engine:
    def __init__(self, tier: Tier) -> None:
        inbox = Inbox()
        self.config = make_config(has_tiers=True, num_pictures=4, caches_prefixes=False)
        name = partial(entry_key, model_digest="model", processor="", dtype="fake")
        self.store = TieredStore(None, [tier])
        width = 48 // TOKENS_PER_PICTURE
        tiers = EmbeddingTiers(self.store, name, EmbeddingFormat("uint8", width, width), inbox.wake)
        self.tiers = tiers
        kv_cache = self.config.kv_cache
        self.runner = FakeRunner(kv_cache.num_blocks, kv_cache.block_size, None, lambda *given: tiers.keeping()(*given))
        loaded = make_engine(self.config, self.runner, inbox, tiers=tiers, accepts_unrequested_pixels=False)
        self.engine = InProcessEngine(loaded, MediaPool(1), PixelSource(), None, Counters())
        self.engine.start()
        self._num_asked = 0

    def begin(self, *parts: int | str) -> "Answer":
        self._num_asked += 1
        return Answer(self, f"r{self._num_asked}", *parts)

    def expect_right_answer(self, *parts: int | str) -> None:
        self.begin(*parts).expect_right()


class Answer:
    def __init__(self, engine: Engine, request_id: str, *parts: int | str) -> None:
        self._engine, self._request = engine, make_request(request_id, *parts)
        self._outputs: SimpleQueue[list[TokenOutput | Exception]] = SimpleQueue()
        engine.engine.submit(cast(PreparedRequest, MadeUpRequest(self._request)), self._outputs.put)

    def expect_right(self) -> None:
        tokens: list[int] = []
        while True:
            for output in self._outputs.get(timeout=SOON):
                assert isinstance(output, TokenOutput), output
                tokens.append(output.token_id)
                if output.finish_reason:
                    max_model_len = self._engine.config.scheduler.max_model_len
                    assert tokens == expected_answer(self._request, 0, END_IDS, max_model_len)
                    return


@contextmanager
def engine_over(tier: Tier) -> Iterator[Engine]:
    engine = Engine(tier)
    try:
        yield engine
    finally:
        engine.engine.close()
    assert engine.runner.num_loaded == 0
    assert engine.runner.num_held_pixels == 0


def test_embeddings_of_one_engine_are_found_by_another() -> None:
    tier = FakeTier()
    for encoded in (["cat", "dog"], []):
        with engine_over(tier) as engine:
            engine.expect_right_answer(3, "cat", 2, "dog")
            assert engine.runner.encoded == encoded
            assert engine.store.wait_written(SOON)


def test_the_next_engine_tells_what_a_tier_holds_before_any_request_and_reads_nothing() -> None:
    tier = FakeTier()

    def find(engine: Engine, *media_hashes: str) -> tuple[tuple[str, ...], bool]:
        return asyncio.run(engine.engine.find_media(media_hashes))

    with engine_over(tier) as engine:
        engine.expect_right_answer(3, "cat", 2, "dog")
        assert engine.store.wait_written(SOON)
    with engine_over(tier) as engine:
        assert find(engine, "cat", "dog") == (("disk",), False)
        assert find(engine, "cat", "cow") == ((), False)
        assert tier.num_gets == 2  # those of the first engine, which encoded both
        engine.expect_right_answer(3, "cat")
        assert find(engine, "cat") == (("device", "disk"), False)
        assert find(engine, "cat", "dog") == (("disk",), False)


class SlowToClear(FakeTier):
    """Fails to clear once, then waits to be let."""

    def __init__(self) -> None:
        super().__init__()
        self.num_clears = 0
        self.is_clearing, self.may_clear = threading.Event(), threading.Event()

    def clear(self) -> None:
        self.num_clears += 1
        if self.num_clears == 1:
            raise OSError("try again")
        self.is_clearing.set()
        assert self.may_clear.wait(SOON)
        super().clear()


def test_a_reset_is_confirmed_once_the_tiers_are_empty_and_holds_back_no_request() -> None:
    tier = SlowToClear()
    with engine_over(tier) as engine, ThreadPoolExecutor(1) as pool:
        engine.expect_right_answer(3, "cat")
        assert engine.store.wait_written(SOON)
        before = set(tier.entries)
        reset = pool.submit(engine.engine.reset_caches, encoder=True)
        assert tier.is_clearing.wait(SOON)
        engine.expect_right_answer(3, "dog")
        engine.engine.reset_caches(prefix=True)  # waits for its own tiers alone
        assert not reset.done()
        assert before
        assert before <= set(tier.entries)
        tier.may_clear.set()
        reset.result(SOON)
        assert not before & set(tier.entries)
        engine.expect_right_answer(3, "cat")
        assert engine.runner.encoded == ["cat", "dog", "cat"]


def test_the_loop_does_not_sleep_on_what_tiers_answered_while_a_step_was_planned() -> None:
    tiers = in_host_memory()
    engine = SteppedEngine(tiers=tiers, caches_prefixes=False)
    engine.ask("a", 3, "cat", 4)
    # Held when the request arrives, so that no tier is asked, and gone when the step is planned.
    engine.inbox.try_put(make_request("b", 5, "cat", 4))
    engine.inbox.try_put(ResetCaches("reset", encoder=True))
    stepping = threading.Thread(target=engine.step_until_answered, daemon=True)
    stepping.start()
    stepping.join(SOON)
    assert not stepping.is_alive()
    tiers.close()


def test_a_request_waiting_for_a_slow_tier_delays_no_other_and_may_leave() -> None:
    tier = FakeTier()
    with engine_over(tier) as engine:
        engine.expect_right_answer(2, "cat")
        assert engine.store.wait_written(SOON)
    tier.may_read.clear()
    with engine_over(tier) as engine:
        # Long enough for everything that follows.
        engine.tiers._encoding_cost.seconds = SOON
        slow, left = engine.begin(2, "cat"), engine.begin(3, "cat")
        engine.expect_right_answer(5)
        assert engine.engine.leave(left._request.request_id)
        tier.may_read.set()
        slow.expect_right()
        assert engine.runner.encoded == []


def test_a_tier_that_takes_longer_than_encoding_loses_the_race() -> None:
    tier = FakeTier()
    tier.may_read.clear()
    with engine_over(tier) as engine:
        engine.tiers._encoding_cost.seconds = 0.001
        engine.expect_right_answer(2, "cat")
        assert engine.runner.encoded == ["cat"]
        tier.may_read.set()


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("a fault of our own")])
def test_no_answer_is_lost_when_a_tier_fails(error: Exception) -> None:
    tier = FakeTier()
    tier.error = error
    with engine_over(tier) as engine:
        for name in ("cat", "dog", "cat"):
            engine.expect_right_answer(2, name)
        [status] = engine.tiers.status()
        assert status.reason is not None


@needs_redis
def test_a_second_server_answers_from_a_real_redis() -> None:
    pictures = [f"picture {number}" for number in range(20)]
    with real_server() as (url, _):
        for encoded in (pictures, []):
            with engine_over(RedisTier(url)) as engine:
                for picture in pictures:
                    engine.expect_right_answer(2, picture)
                assert engine.runner.encoded == encoded
                assert engine.store.wait_written(SOON)


@needs_redis
def test_no_answer_is_lost_when_redis_is_killed_under_load() -> None:
    pictures = [f"picture {number}" for number in range(60)]
    with real_server() as (url, process):
        with engine_over(RedisTier(url)) as engine:
            for picture in pictures[:30]:
                engine.expect_right_answer(2, picture)
            assert engine.store.wait_written(SOON)
        with engine_over(RedisTier(url, timeout=0.5)) as engine:
            # While loads are in progress, some of them queued behind others.
            killer = threading.Timer(0.002, process.kill)
            killer.start()
            answers = [engine.begin(2, picture) for picture in pictures]
            for answer in answers:
                answer.expect_right()
            killer.join()
            process.wait()
            began = time.monotonic()
            engine.expect_right_answer(3, "another")
            assert time.monotonic() - began < SOON
            assert engine.tiers.status()[0].reason is not None
