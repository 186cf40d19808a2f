"""A reset succeeds once every engine has confirmed it, and never if one may still find what was there before."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from keepsight.errors import EngineLostError, ServerOverloadedError
from keepsight.frontend import reset_query
from keepsight.frontend.engine_client import EngineClient
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixels.pixel_cache import LocalCache, PixelCache
from keepsight.observe.catalogue import PROCESSOR
from keepsight.observe.counters import Counters
from keepsight.requests import CachesReset, MediaFound, ResetCaches, ToEngine
from tests.counted import read_counters

SOON = 20  # seconds; normally takes milliseconds
NOT_ALL = "did not reach all engines: reset again"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail tests that only end because nobody waits any longer."""
    monkeypatch.setattr(reset_query, "RESET_SECONDS", 3 * SOON)


@pytest.fixture
def client() -> Iterator[EngineClient]:
    client = EngineClient(MediaPool(1))
    yield client
    assert not client._queries
    client.close()


class Engine:
    """Records the resets it is told, and confirms each at once unless it is slow."""

    def __init__(self, client: EngineClient, rank: int = 0, *, is_slow: bool = False) -> None:
        self._client, self._rank, self._is_slow = client, rank, is_slow
        self.told: list[ResetCaches] = []
        self.is_told = threading.Event()
        client.connect(self._hear, rank)

    def _hear(self, message: ToEngine) -> bool:
        assert isinstance(message, ResetCaches)
        self.told.append(message)
        self.is_told.set()
        if not self._is_slow:
            self.confirm()
        return True

    def confirm(self) -> None:
        assert self.is_told.wait(SOON)
        self._client.receive([CachesReset(self.told[-1].query_id)], self._rank)

    @property
    def resets(self) -> list[tuple[bool, bool, bool]]:
        return [(each.prefix, each.encoder, each.processor) for each in self.told]


def reset_while(client: EngineClient, slow: Engine, *happens: Callable[[], object]) -> None:
    """Let these happen on another thread once the engine has been told; raise what the reset raises."""

    def happen() -> None:
        assert slow.is_told.wait(SOON)
        for each in happens:
            each()

    thread = threading.Thread(target=happen)
    thread.start()
    try:
        client.reset_caches(encoder=True)
    finally:
        thread.join(SOON)


def test_a_reset_reaches_all_engines_and_is_over_once_the_last_has_confirmed_it(client: EngineClient) -> None:
    quick, slow = Engine(client, 0), Engine(client, 1, is_slow=True)
    with ThreadPoolExecutor(1) as pool:
        reset = pool.submit(client.reset_caches, encoder=True)
        assert slow.is_told.wait(SOON)
        assert not reset.done()
        slow.confirm()
        reset.result(SOON)
    assert quick.resets == slow.resets == [(False, True, False)]


def test_a_reset_that_an_engine_was_sent_and_dies_before_it_confirms_is_an_error(client: EngineClient) -> None:
    slow = Engine(client, is_slow=True)
    with pytest.raises(EngineLostError, match=NOT_ALL):
        reset_while(client, slow, partial(client.disconnect, "killed"))


def test_an_engine_that_dies_after_it_has_confirmed_has_done_its_part(client: EngineClient) -> None:
    quick, slow = Engine(client, 0), Engine(client, 1, is_slow=True)
    reset_while(client, slow, partial(client.disconnect, "killed", 0), slow.confirm)
    assert quick.resets == [(False, True, False)]


def test_another_engine_s_or_another_question_s_answer_confirms_nothing(client: EngineClient) -> None:
    slow = Engine(client, 0, is_slow=True)

    def answer_wrongly() -> None:
        query_id = slow.told[0].query_id
        client.receive([CachesReset(query_id)], rank=1)
        client.receive([MediaFound(query_id, (), False), CachesReset("another")], rank=0)

    with pytest.raises(EngineLostError, match=NOT_ALL):
        reset_while(client, slow, answer_wrongly, partial(client.disconnect, "killed"))


def test_a_reset_that_is_not_confirmed_in_time_is_an_error(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reset_query, "RESET_SECONDS", 0.01)
    slow = Engine(client, is_slow=True)
    with pytest.raises(ServerOverloadedError, match="not confirmed within 0 s: reset again"):
        client.reset_caches(encoder=True)
    slow.confirm()


def test_a_reset_that_reaches_no_engine_is_an_error(client: EngineClient) -> None:
    with pytest.raises(EngineLostError, match="reset again"):
        client.reset_caches(encoder=True)


def test_a_reset_that_an_engine_does_not_get_is_an_error_but_reaches_the_others(client: EngineClient) -> None:
    client.connect(lambda _: False, 0)
    other = Engine(client, 1)
    with pytest.raises(EngineLostError, match=NOT_ALL):
        client.reset_caches(prefix=True)
    assert other.resets == [(True, False, False)]


def test_a_reset_while_a_living_engine_is_not_connected_is_an_error(client: EngineClient) -> None:
    for rank in range(2):
        client.expect(rank, lives=True)
        engine = Engine(client, rank)
    client.disconnect("it was not read from", 0)
    with pytest.raises(EngineLostError, match=NOT_ALL):
        client.reset_caches(encoder=True)
    assert engine.resets == [(False, True, False)]
    # The next one of this rank begins with empty caches.
    client.expect(0, lives=False)
    client.reset_caches(encoder=True)


@pytest.mark.parametrize("end", [lambda client: client.give_up("no engine comes"), EngineClient.close])
def test_a_client_that_ends_ends_its_resets(client: EngineClient, end: Callable[[EngineClient], None]) -> None:
    slow = Engine(client, is_slow=True)
    with pytest.raises(EngineLostError):
        reset_while(client, slow, partial(end, client))


def test_a_processor_cache_that_cannot_be_cleared_is_not_said_to_be() -> None:
    class Stuck(PixelCache):
        def clear(self) -> None:
            raise TimeoutError("another process holds it")

    client = EngineClient(MediaPool(1, Stuck()))
    Engine(client)
    with pytest.raises(ServerOverloadedError, match="another process holds it"):
        client.reset_caches(processor=True)
    client.close()


def test_pixels_that_another_frontend_cleared_are_freed_and_counted_no_more() -> None:
    mark, counters = bytearray(8), Counters()
    cache = LocalCache(1000, mark)
    cache.put("cat", np.zeros((2, 2, 3), np.uint8))
    client = EngineClient(MediaPool(1, cache, counters=counters))
    with closing(client):
        assert read_counters(counters, PROCESSOR.entries, PROCESSOR.num_bytes) == [1, 12]
        LocalCache(1000, mark).clear()
        client.receive([CachesReset("another's")])
        assert read_counters(counters, PROCESSOR.entries, PROCESSOR.num_bytes) == [0, 0]
