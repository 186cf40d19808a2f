"""Requests arrive, leave and fail on several threads; the others are answered as if alone, and nothing is left behind.

The scheduler is real; the fake runner hashes its pages in place of a model, so one wrong page changes an answer.
"""

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import KeptPixels, PixelSource
from keepsight.errors import PictureError, RequestFailedError
from keepsight.frontend.caller import Outputs
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.ipc.run_directory import RunDirectory
from keepsight.observe.counters import Counters
from keepsight.requests import EngineRequest, Pixels
from keepsight.scheduling.step_plan import StepPlan, StepResult
from keepsight.testing import FakeRunner, expected_answer, pixels_like
from tests.engine.made_up_engine import make_engine
from tests.made_up_request import MadeUpRequest
from tests.scheduling.drive import END_IDS, make_config, make_request
from tests.wait_until import wait_until

SOON = 20  # seconds, for operations that take milliseconds
ENDLESS: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


@dataclass
class Prepared(MadeUpRequest):
    """`bad` cannot be decoded; `studio` records what is made, and can make it wait."""

    studio: "Studio"

    def make(self, media_hash: str) -> Pixels:
        return self.studio.make(media_hash)


@dataclass
class Studio:
    made: list[str] = field(default_factory=list)
    may_make: threading.Event = field(default_factory=threading.Event)

    def make(self, media_hash: str) -> Pixels:
        self.made.append(media_hash)
        assert self.may_make.wait(SOON)
        if media_hash.startswith("bad"):
            raise PictureError("image", f"{media_hash} is no picture")
        return pixels_like(media_hash)


class Runner(FakeRunner):
    """Each step waits for permission; work beside the steps finishes, and is reported, some time after a step."""

    def __init__(self, inbox: Inbox, is_done: Callable[[], bool] | None = None) -> None:
        super().__init__(64, 4, is_done)
        self.inbox = inbox
        self.may_step, self.in_step = threading.Event(), threading.Event()
        self.may_step.set()
        self.steps_one_by_one = False
        self.error: Exception | None = None
        self.is_closed = False

    def run(self, plan: StepPlan) -> StepResult:
        if not plan.is_empty:
            self.in_step.set()
            assert self.may_step.wait(SOON)
            if self.steps_one_by_one:
                self.may_step.clear()
        if self.error is not None:
            raise self.error
        result = super().run(plan)
        if self._beside:
            threading.Timer(0.0005, self.inbox.wake).start()
        return result

    def close(self) -> None:
        self.is_closed = True


class Bench:
    def __init__(
        self,
        is_done: Callable[[], bool] | None = None,
        source: PixelSource | None = None,
        run_directory: RunDirectory | None = None,
        **config: Any,
    ) -> None:
        inbox = Inbox()
        self.config = make_config(**config)
        self.runner, self.studio = Runner(inbox, is_done), Studio()
        self.studio.may_make.set()
        self.pool = MediaPool(2)
        loaded = make_engine(self.config, self.runner, inbox)
        self.scheduler = loaded.scheduler
        self.engine = InProcessEngine(loaded, self.pool, source or PixelSource(), run_directory, Counters())
        self.engine.start()
        self._asked: dict[str, EngineRequest] = {}

    def prepare(self, request_id: str, *parts: int | str, **options: Any) -> PreparedRequest:
        request = make_request(request_id, *parts, **options)
        self._asked[request_id] = request
        return cast(PreparedRequest, Prepared(request, self.studio))

    def alone(self, request_id: str, choice: int = 0) -> list[int]:
        return expected_answer(self._asked[request_id], choice, END_IDS, self.config.scheduler.max_model_len)

    async def answer(self, request_id: str, *parts: int | str, **options: Any) -> list[int]:
        return [token.token_id async for token in self.engine.generate(self.prepare(request_id, *parts, **options))]

    def check_nothing_is_left(self) -> None:
        """Only after closing: before that, the scheduler belongs to the engine's thread."""
        assert self.runner.is_closed
        assert not self.engine._callers
        assert not self.pool._waiters


@contextmanager
def bench(**options: Any) -> Iterator[Bench]:
    made = Bench(**options)
    try:
        yield made
    finally:
        made.runner.may_step.set()
        made.studio.may_make.set()
        made.engine.close()
    made.check_nothing_is_left()


def run(story: Any) -> None:
    asyncio.run(asyncio.wait_for(story, SOON))


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def settle(made: Bench) -> None:
    """Return when the engine has read all its messages and holds no request any more."""
    run(until(lambda: not made.scheduler.lineup and made.runner.num_sequences == 0))


def test_requests_at_once_are_all_answered_as_if_alone() -> None:
    async def story(made: Bench) -> None:
        answers = await asyncio.gather(
            made.answer("a", 5, "cat", 3), made.answer("b", 5, "dog", 4), made.answer("c", 20)
        )
        assert list(answers) == [made.alone(name) for name in "abc"]

    with bench() as made:
        run(story(made))
        settle(made)


def test_a_picture_that_two_requests_wait_for_is_made_and_encoded_once() -> None:
    async def story(made: Bench) -> None:
        made.studio.may_make.clear()
        running = [asyncio.ensure_future(made.answer(name, 5, "cat", 3)) for name in "ab"]
        await until(lambda: made.pool._waiters.has_any("cat") and len(made.engine._callers) == 2)
        made.studio.may_make.set()
        assert [await answer for answer in running] == [made.alone("a"), made.alone("b")]
        assert (made.studio.made, made.runner.encoded) == (["cat"], ["cat"])

    with bench() as made:
        run(story(made))
        settle(made)


def test_room_for_pixels_is_used_for_pictures_whose_embeddings_were_evicted() -> None:
    async def story(made: Bench) -> None:
        for number, picture in enumerate(["cat", "dog", "bird", "cat", "bird", "cat"]):
            assert await made.answer(f"r{number}", 5, picture, 3) == made.alone(f"r{number}")
        # The encoder cache had room for one picture, so none was in it when it was needed again.
        assert made.runner.encoded == ["cat", "dog", "bird", "cat", "bird", "cat"]
        assert made.studio.made == ["cat", "dog", "bird"]

    kept = KeptPixels(2 * pixels_like("cat").nbytes)
    with bench(source=kept, num_pictures=1, caches_prefixes=False) as made:
        run(story(made))
        kept.check_invariants()


def test_the_event_loop_turns_while_a_step_is_computed() -> None:
    async def story(made: Bench) -> None:
        made.runner.may_step.clear()
        running = asyncio.ensure_future(made.answer("a", 5))
        await until(made.runner.in_step.is_set)
        made.runner.may_step.set()  # impossible if the event loop were waiting for the step
        assert await running == made.alone("a")

    with bench() as made:
        run(story(made))


def test_a_client_that_leaves_between_two_tokens_frees_the_engine() -> None:
    async def story(made: Bench) -> None:
        tokens = made.engine.generate(made.prepare("a", 5, **ENDLESS))
        assert (await anext(tokens)).token_id == made.alone("a")[0]
        await tokens.aclose()
        made.runner.steps_one_by_one = False
        made.runner.may_step.set()

    with bench() as made:
        made.runner.steps_one_by_one = True
        run(story(made))
        settle(made)
        # A step may have begun before the engine read the abort.
        assert made.runner.num_computed_tokens in (5, 6)


def test_a_client_that_leaves_in_the_middle_of_a_step_frees_the_engine_after_it() -> None:
    async def story(made: Bench) -> None:
        made.runner.may_step.clear()
        leaving = asyncio.ensure_future(made.answer("a", 5, **ENDLESS))
        await until(made.runner.in_step.is_set)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        made.runner.may_step.set()
        assert await made.answer("b", 5) == made.alone("b")

    with bench() as made:
        run(story(made))
        settle(made)


def test_a_client_that_leaves_while_its_picture_is_made_delays_no_other() -> None:
    async def story(made: Bench) -> None:
        made.studio.may_make.clear()
        leaving, staying = (asyncio.ensure_future(made.answer(name, 5, "cat", 3)) for name in "ab")
        await until(lambda: made.studio.made)
        leaving.cancel()
        made.studio.may_make.set()
        assert await staying == made.alone("b")

    with bench() as made:
        run(story(made))
        settle(made)


def test_a_picture_that_cannot_be_decoded_fails_its_requests_and_no_other() -> None:
    async def story(made: Bench) -> None:
        asked = [made.answer("a", 5, "bad", 3), made.answer("b", "bad", 9), made.answer("c", 5, "cat", 3)]
        first, second, third = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(first, PictureError)
        assert isinstance(second, PictureError)
        assert third == made.alone("c")

    with bench() as made:
        run(story(made))
        settle(made)


def test_two_bad_pictures_of_one_request_fail_it_once() -> None:
    with bench() as made:
        heard: list[Outputs] = []
        made.engine.submit(made.prepare("a", "bad1", "bad2", 3), heard.append)
        run(until(lambda: heard))
        settle(made)
        [[error]] = heard
        assert isinstance(error, PictureError)


def test_an_embedding_that_cannot_be_made_fails_its_request() -> None:
    async def story(made: Bench) -> None:
        made.runner.bad_media.add("cat")
        with pytest.raises(RequestFailedError, match="a bad picture") as caught:
            await made.answer("a", "cat", 3)
        assert caught.value.status == 500
        assert await made.answer("b", "dog", 3) == made.alone("b")

    with bench() as made:
        run(story(made))


def test_a_request_that_can_never_run_is_refused_with_the_numbers() -> None:
    async def story(made: Bench) -> None:
        with pytest.raises(RequestFailedError, match="the prompt has 300 tokens") as caught:
            await made.answer("a", 300)
        assert caught.value.status == 400
        assert await made.answer("b", 5) == made.alone("b")

    with bench() as made:
        run(story(made))


def test_an_engine_that_fails_answers_all_requests_now_and_later() -> None:
    async def story(made: Bench) -> None:
        made.runner.may_step.clear()
        running = [asyncio.ensure_future(made.answer(name, 5, **ENDLESS)) for name in "ab"]
        await until(made.runner.in_step.is_set)
        made.runner.error = RuntimeError("out of luck")
        made.runner.may_step.set()
        for answer in running:
            with pytest.raises(RequestFailedError, match="the engine failed: RuntimeError: out of luck"):
                await answer
        with pytest.raises(RequestFailedError, match="out of luck"):
            await made.answer("c", 5)
        with pytest.raises(RequestFailedError, match="out of luck"):
            made.engine.submit(made.prepare("d", 5), lambda outputs: None)

    with bench() as made:
        run(story(made))


def test_closing_fails_running_requests_refuses_new_ones_and_may_be_done_twice() -> None:
    async def story(made: Bench) -> None:
        made.runner.may_step.clear()
        running = asyncio.ensure_future(made.answer("a", 5, **ENDLESS))
        await until(made.runner.in_step.is_set)
        closing = asyncio.ensure_future(asyncio.to_thread(made.engine.close))
        await until(lambda: made.engine._inbox.is_closed)
        made.runner.may_step.set()
        await closing
        for answer in (running, made.answer("b", 5)):
            with pytest.raises(RequestFailedError, match="the engine was closed"):
                await answer

    with bench() as made:
        run(story(made))
        assert not made.engine._thread.is_alive()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_closing_that_is_interrupted_is_finished_by_the_next(tmp_path: Path) -> None:
    def interrupt(made: Bench) -> None:
        wait_until(lambda: made.engine._inbox.is_closed)
        time.sleep(0.05)  # until it waits for the step
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with bench(run_directory=RunDirectory.create(tmp_path)) as made:
        made.runner.may_step.clear()
        made.engine.submit(made.prepare("a", 5, **ENDLESS), lambda outputs: None)
        assert made.runner.in_step.wait(SOON)
        threading.Thread(target=interrupt, args=(made,)).start()
        with pytest.raises(KeyboardInterrupt):
            made.engine.close()
        threading.Timer(0.05, made.runner.may_step.set).start()
        made.engine.close()
        assert made.runner.is_closed
        assert not list(tmp_path.iterdir())


def test_an_engine_that_was_never_started_can_be_closed() -> None:
    runner = Runner(inbox := Inbox())
    loaded = make_engine(make_config(), runner, inbox)
    engine = InProcessEngine(loaded, MediaPool(2), PixelSource(), None, Counters())
    engine.close()
    engine.close()
    assert runner.is_closed


def test_a_choice_that_is_stopped_ends_and_the_others_go_on() -> None:
    async def story(made: Bench) -> None:
        asked = made.prepare("a", 5, n=2, temperature=1, max_tokens=6, ignore_eos=True)
        heard: dict[int, list[int]] = {0: [], 1: []}
        async for token in made.engine.generate(asked):
            heard[token.choice].append(token.token_id)
            if token.choice == 0:
                made.engine.note_read("a", 0, "stop")
                made.runner.steps_one_by_one = False
            made.runner.may_step.set()
        assert heard[1] == made.alone("a", 1)
        # A step may have begun before the engine read the abort.
        assert heard[0] in (made.alone("a", 0)[:1], made.alone("a", 0)[:2])

    with bench() as made:
        made.runner.steps_one_by_one = True
        run(story(made))
        settle(made)


def test_an_answer_ends_when_its_last_choice_is_stopped() -> None:
    async def story(made: Bench) -> None:
        async for token in made.engine.generate(made.prepare("a", 5, **ENDLESS)):
            made.engine.note_read("a", token.choice, "stop")
            made.engine.note_read("a", token.choice, "stop")
        made.engine.note_read("a", 0, "stop")
        made.runner.steps_one_by_one = False
        made.runner.may_step.set()

    with bench() as made:
        made.runner.steps_one_by_one = True
        run(story(made))
        settle(made)
        assert made.runner.num_computed_tokens in (5, 6)


def test_the_outputs_of_a_step_wake_an_event_loop_once() -> None:
    async def story(made: Bench) -> None:
        event_loop: Any = asyncio.get_running_loop()
        cross, crossings = event_loop.call_soon_threadsafe, list[object]()

        def count(callback: Any, *arguments: Any) -> Any:
            crossings.append(arguments)
            return cross(callback, *arguments)

        made.runner.may_step.clear()
        event_loop.call_soon_threadsafe = count
        running = [asyncio.ensure_future(made.answer(name, 5, max_tokens=30, ignore_eos=True)) for name in "abcd"]
        await until(lambda: made.runner.in_step.is_set() and len(made.engine._callers) == 4)
        made.runner.may_step.set()
        await asyncio.gather(*running)
        # The first token may arrive in a step of its own.
        assert len(crossings) <= 31

    with bench() as made:
        run(story(made))


def test_an_event_loop_that_is_gone_does_not_harm_the_engine() -> None:
    async def begin(made: Bench) -> Any:
        tokens = made.engine.generate(made.prepare("a", 5, **ENDLESS))
        await anext(tokens)
        made.runner.may_step.clear()
        return tokens

    with bench() as made:
        event_loop = asyncio.new_event_loop()
        tokens = event_loop.run_until_complete(begin(made))
        event_loop.close()
        made.runner.may_step.set()
        run(made.answer("b", 5))
        settle(made)
        del tokens


def test_resetting_a_cache_affects_later_requests_only() -> None:
    async def cached(made: Bench, name: str) -> int:
        # Read to the end: a request that still runs after the reset may compute blocks that the next one rightly finds.
        tokens = [token async for token in made.engine.generate(made.prepare(name, 20, "cat", 9))]
        return tokens[0].num_cached_tokens

    async def story(made: Bench) -> None:
        assert await cached(made, "a") == 0
        assert await cached(made, "b") == 34
        made.engine.reset_caches(prefix=True)
        assert await cached(made, "c") == 0
        assert made.runner.encoded == ["cat"]
        made.engine.reset_caches(prefix=True, encoder=True)
        assert await cached(made, "d") == 0
        assert made.runner.encoded == ["cat", "cat"]

    with bench() as made:
        run(story(made))


def test_a_submitted_request_is_heard_of_on_another_thread_until_it_ends() -> None:
    with bench() as made:
        heard: list[Any] = []
        ended = threading.Event()

        def hear(outputs: Outputs) -> None:
            assert threading.current_thread() is not threading.main_thread()
            heard.extend(outputs)
            if heard[-1].finish_reason:
                ended.set()

        made.engine.submit(made.prepare("a", 5, "cat", 3), hear)
        assert ended.wait(SOON)
        assert [token.token_id for token in heard] == made.alone("a")
        assert not made.engine.leave("a")


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_that_come_and_go_at_random_are_answered_as_if_alone(seed: int) -> None:
    """There is little room, work beside the steps ends at random, and some pictures are bad."""
    chance = random.Random(seed)
    choices: list[int | str] = [3, 9, 17, "cat", "dog", "owl", "fox", "bad"]

    async def ask(made: Bench, name: str) -> None:
        await asyncio.sleep(chance.random() * 0.2)
        parts = [chance.choice(choices) for _ in range(chance.randint(1, 4))]
        asked = made.prepare(name, 2, *parts, 1, n=chance.randint(1, 3), temperature=1, max_tokens=12)
        stays, heard = chance.random() < 0.7, dict[int, list[int]]()
        try:
            async for token in (tokens := made.engine.generate(asked)):
                heard.setdefault(token.choice, []).append(token.token_id)
                if not stays and chance.random() < 0.3:
                    await tokens.aclose()
                    break
        except PictureError:
            assert "bad" in parts
            return
        assert "bad" not in parts
        for choice, token_ids in heard.items():
            expected = made.alone(name, choice)
            assert token_ids == (expected if stays else expected[: len(token_ids)])

    async def story(made: Bench) -> None:
        await asyncio.gather(*(ask(made, str(number)) for number in range(60)))

    options = {"num_blocks": 40, "num_pictures": 2, "max_num_seqs": 5, "max_prompt_tokens_beside_streams": 4}
    with bench(is_done=lambda: chance.random() < 0.5, **options) as made:
        run(story(made))
        settle(made)
        made.scheduler.check_invariants()
        assert made.runner.num_held_pixels == 0
