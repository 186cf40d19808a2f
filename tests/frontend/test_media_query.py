"""Every question to the engines ends, whatever becomes of them, with what those that answered have said."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest

from keepsight.errors import WireError
from keepsight.frontend import media_query
from keepsight.frontend.engine_client import EngineClient
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.media_query import MediaPlaces
from keepsight.requests import FindMedia, MediaFound, ToEngine

SOON = 20  # seconds; normally takes milliseconds
NOWHERE = MediaPlaces()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail tests that only end because nobody waits any longer."""
    monkeypatch.setattr(media_query, "ANSWER_SECONDS", 3 * SOON)


@pytest.fixture
def client() -> Iterator[EngineClient]:
    client = EngineClient(MediaPool(1))
    yield client
    assert not client._queries
    client.close()


class Engine:
    """Records the questions it is asked, and answers at once if it is given an answer."""

    def __init__(self, client: EngineClient, rank: int = 0, says: MediaPlaces | None = None) -> None:
        self._client, self._rank, self._says = client, rank, says
        self.asked: list[FindMedia] = []
        client.connect(self._hear, rank)

    def _hear(self, message: ToEngine) -> bool:
        assert isinstance(message, FindMedia)
        self.asked.append(message)
        if self._says is not None:
            self.answer(*self._says)
        return True

    def answer(self, embeddings: tuple[str, ...] = (), is_in_prefixes: bool = False) -> None:
        self._client.receive([MediaFound(self.asked[-1].query_id, embeddings, is_in_prefixes)], self._rank)


def find(client: EngineClient, *media_hashes: str) -> MediaPlaces:
    return asyncio.run(asyncio.wait_for(client.find_media(media_hashes), SOON))


def find_while(client: EngineClient, *happens: Callable[[], object]) -> MediaPlaces:
    """Ask, let these happen on another thread while the question is open before each of them, and return the answer."""

    async def find() -> MediaPlaces:
        asking = asyncio.create_task(client.find_media(["cat"]))
        for each in happens:
            await asyncio.sleep(0)
            assert not asking.done()
            await asyncio.to_thread(each)
        return await asyncio.wait_for(asking, SOON)

    return asyncio.run(find())


def test_all_engines_are_asked_and_a_tier_counts_if_any_of_them_has_it(client: EngineClient) -> None:
    engines = [
        Engine(client, 0, says=MediaPlaces(("host", "disk"), False)),
        Engine(client, 1, says=MediaPlaces(("device", "disk"), True)),
        Engine(client, 2, says=NOWHERE),
    ]
    assert find(client, "cat", "dog", "cat") == MediaPlaces(("device", "host", "disk"), True)
    assert {engine.asked[0].media_hashes for engine in engines} == {("cat", "dog")}


def test_the_answer_of_each_engine_is_waited_for(client: EngineClient) -> None:
    one, other = Engine(client, 0), Engine(client, 1)
    found = find_while(client, partial(one.answer, ("disk",)), partial(other.answer, ("device",), True))
    assert found == MediaPlaces(("device", "disk"), True)


def test_an_engine_that_is_lost_meanwhile_is_left_out(client: EngineClient) -> None:
    one, _ = Engine(client, 0), Engine(client, 1)
    assert find_while(client, partial(one.answer, ("disk",)), lambda: client.disconnect("killed", 1)) == (
        ("disk",),
        False,
    )


def test_an_engine_that_cannot_be_reached_is_left_out(client: EngineClient) -> None:
    client.connect(lambda _: False, 0)
    assert find(client, "cat") == NOWHERE
    Engine(client, 1, says=MediaPlaces(("disk",), True))
    assert find(client, "cat") == (("disk",), True)


def test_an_engine_that_does_not_answer_in_time_is_left_out_and_its_late_answer_changes_nothing(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, _ = Engine(client, 0), Engine(client, 1, says=MediaPlaces(("host",), False))
    with monkeypatch.context() as hurry:
        hurry.setattr(media_query, "ANSWER_SECONDS", 0.01)
        assert find(client, "cat") == (("host",), False)
    slow.answer(("disk",), True)
    late = MediaFound(slow.asked[0].query_id, ("disk",), True)
    assert find_while(client, partial(client.receive, [late]), slow.answer) == (("host",), False)


def test_an_engine_answers_once_and_only_what_it_was_asked(client: EngineClient) -> None:
    one, other = Engine(client, 0), Engine(client, 1)

    def come_late() -> None:
        Engine(client, 2)
        client.receive([MediaFound(one.asked[0].query_id, ("remote",), True)], rank=2)

    assert find_while(client, one.answer, come_late, partial(one.answer, ("disk",)), other.answer) == NOWHERE


def test_without_an_engine_nothing_is_waited_for(client: EngineClient) -> None:
    assert find(client, "cat") == NOWHERE


@pytest.mark.parametrize("end", [lambda client: client.give_up("no engine comes"), EngineClient.close])
def test_a_client_that_ends_does_not_wait(client: EngineClient, end: Callable[[EngineClient], None]) -> None:
    one, _ = Engine(client, 0), Engine(client, 1)
    assert find_while(client, partial(one.answer, ("disk",)), partial(end, client)) == (("disk",), False)
    assert find(client, "cat") == NOWHERE


def test_an_asker_that_leaves_is_forgotten(client: EngineClient) -> None:
    engine = Engine(client)

    async def leave() -> None:
        asking: Awaitable[MediaPlaces] = client.find_media(["cat"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asking, 0.01)

    asyncio.run(leave())
    engine.answer(("disk",))


def test_an_engine_may_answer_when_the_asker_s_event_loop_is_closed(client: EngineClient) -> None:
    engine, event_loop = Engine(client), asyncio.new_event_loop()
    event_loop.set_exception_handler(lambda *_: None)  # the task that never ends is meant
    finding = client.find_media(["cat"])
    asking = event_loop.create_task(finding)
    event_loop.run_until_complete(asyncio.sleep(0))
    event_loop.close()
    assert client._queries
    engine.answer(("disk",))
    assert not asking.done()
    finding.close()


def test_a_question_that_cannot_be_sent_fails_and_is_forgotten(client: EngineClient) -> None:
    def refuse(_: ToEngine) -> bool:
        raise WireError("an unpaired surrogate is not text")

    client.connect(refuse)
    with pytest.raises(WireError, match="surrogate"):
        find(client, "cat")


def test_names_of_places_that_do_not_exist_are_not_passed_on(client: EngineClient) -> None:
    Engine(client, says=MediaPlaces(("disk", "attic"), False))
    assert find(client, "cat") == (("disk",), False)
