"""Pixels are made once for all requests that wait for them, and only if one does; the pictures here are made up."""

import gc
import mmap
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest

from keepsight.config import Config
from keepsight.frontend import media_pool, media_waiters
from keepsight.frontend.intake.read_embeds import Embeds
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixels import preprocess_image
from keepsight.frontend.pixels.make_pixels import FilmJob, Made, MakePixels, MakingJob, PictureJob, run_job
from keepsight.frontend.pixels.pixel_cache import LocalCache, PixelCache, StoreCache, open_pixel_cache
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.ipc import shared_store
from keepsight.ipc.run_directory import RunDirectory
from keepsight.ipc.shared_store import SharedStore
from keepsight.media import Geometry, MediaItem, Modality, Moment, TokenSpan
from keepsight.observe.account import WORK, RequestAccount, ShownItem
from keepsight.observe.catalogue import DECODED, MISMATCHED, PREPROCESSED, PROCESSOR, VERIFIED
from keepsight.observe.counters import Counters
from keepsight.requests import MediaReport, Pixels, RequestBegun
from keepsight.testing import pixels_like
from tests.counted import counted
from tests.frontend.sample_films import HEIGHT, WIDTH, drawn_frames, film
from tests.ipc.killed import stopped_process
from tests.made_up_request import MadeUpRequest
from tests.scheduling.drive import make_request
from tests.wait_until import wait_until

SOON = 20  # seconds; normally takes milliseconds
BYTES = 3  # per picture in these tests


@dataclass
class Studio:
    """Records what is made; nothing is finished before `door` is open."""

    made: list[tuple[str, ...]] = field(default_factory=list)
    error: Exception | None = None
    door: threading.Event = field(default_factory=threading.Event)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def work(self, media_hashes: Collection[str]) -> dict[str, Pixels]:
        self.made.append(tuple(sorted(media_hashes)))
        self.begun.release()
        assert self.door.wait(SOON)
        if self.error is not None:
            raise self.error
        return {each: np.zeros((1, 1, 3), np.uint8) for each in media_hashes}

    def await_begun(self, num_jobs: int = 1) -> None:
        for _ in range(num_jobs):
            assert self.begun.acquire(timeout=SOON)


@dataclass(frozen=True)
class _EngineRequest:
    request_id: str
    media: tuple[MediaItem, ...]


@dataclass
class FakePrepared:
    """A media hash is a picture, or a crop of it: "a", "a/1". In capitals it is a film."""

    request_id: str
    studio: Studio
    # All media that may be asked for.
    media_hashes: tuple[str, ...] = ()
    # Media sent by uuid only, without content.
    unknown: frozenset[str] = frozenset()
    learned: list[str] = field(default_factory=list)
    account: RequestAccount = field(default_factory=lambda: RequestAccount("", (), 1))

    @property
    def engine_request(self) -> _EngineRequest:
        media = (MediaItem(each, TokenSpan(0, 1), Geometry(1, 1)) for each in self.media_hashes)
        return _EngineRequest(self.request_id, tuple(media))

    def group_by_picture(self, media_hashes: Collection[str]) -> list[tuple[str, ...]]:
        pictures = dict.fromkeys(each[0] for each in media_hashes)
        return [tuple(each for each in media_hashes if each[0] == picture) for picture in pictures]

    def modality_of(self, media_hash: str) -> Modality:
        return "video" if media_hash.isupper() else "image"

    def count_modalities(self, media_hashes: Iterable[str]) -> Counter[Modality]:
        return Counter(map(self.modality_of, media_hashes))

    def pixels_of(self, media_hashes: Collection[str], _make: MakePixels = run_job) -> dict[str, Pixels]:
        return self.studio.work(media_hashes)

    def as_own(self, error: Exception, media_hash: str) -> Exception:
        return type(error)(f"{self.request_id} {media_hash}: {error}")

    def find_unknown(self, media_hashes: Collection[str]) -> LookupError | None:
        return next((LookupError(each) for each in media_hashes if each in self.unknown), None)

    def learn(self, made: Mapping[str, Pixels]) -> None:
        self.learned += made


def break_down(*_: object) -> None:
    raise RuntimeError("its loop is closed")


class Asker:
    """A request, and everything that is delivered to it."""

    def __init__(self, pool: MediaPool, studio: Studio, request_id: str, *unknown: str) -> None:
        self.pool, self.prepared = pool, FakePrepared(request_id, studio, unknown=frozenset(unknown))
        self.heard: list[str | Exception] = []
        self._news = threading.Condition()

    def ask(self, *media_hashes: str) -> "Asker":
        self.ask_unchecked(*media_hashes)
        self.pool.check_invariants()
        return self

    def ask_unchecked(self, *media_hashes: str) -> "Asker":
        prepared: Any = self.prepared
        self.pool.make(prepared, media_hashes, lambda media_hash, _: self._hear(media_hash), self._hear)
        return self

    def forget(self) -> None:
        self.pool.forget(self.prepared.request_id)
        self.pool.check_invariants()

    def _hear(self, news: str | Exception) -> None:
        with self._news:
            self.heard.append(news)
            self._news.notify_all()

    def await_heard(self, count: int) -> list[str | Exception]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.heard) >= count, SOON), self.heard
        return sorted(self.heard, key=str)

    def answered_by(self, *media_hashes: str) -> list[str]:
        """Return which cache answered each item by the request's account, once an engine has encoded them."""
        account, stories = self.prepared.account, [MediaReport(None, 2.0, 3.0)] * len(media_hashes)
        account.media = [ShownItem(each, 1) for each in media_hashes]
        for each in media_hashes:
            account.note_sent(each)
        account.note_begun(RequestBegun(self.prepared.request_id, 1.0, 2.0, 4.0, tuple(stories)))
        return [answered_by for answered_by, _ in account.answers()]


@pytest.fixture
def studio() -> Iterator[Studio]:
    studio = Studio()
    yield studio
    studio.door.set()


@contextmanager
def open_pool(
    studio: Studio, num_workers: int = 1, max_cache_bytes: int = 0, verify_hits: float = 0
) -> Iterator[MediaPool]:
    cache = LocalCache(max_cache_bytes) if max_cache_bytes else PixelCache()
    pool = MediaPool(num_workers, cache, verify_hits=verify_hits)
    try:
        yield pool
    finally:
        studio.door.set()
        pool.close()
        pool.check_invariants()


@pytest.fixture
def pool(studio: Studio) -> Iterator[MediaPool]:
    with open_pool(studio, num_workers=1) as pool:
        yield pool


Ask = Callable[..., Asker]


@pytest.fixture
def ask(pool: MediaPool, studio: Studio) -> Ask:
    return lambda request_id, *media_hashes: Asker(pool, studio, request_id).ask(*media_hashes)


def test_pixels_requested_by_many_at_once_are_made_once_for_all(ask: Ask, studio: Studio) -> None:
    first = ask("first", "a", "b")
    studio.await_begun()
    others = [ask(str(number), "b", "a") for number in range(20)]
    studio.door.set()
    for asker in (first, *others):
        assert asker.await_heard(2) == ["a", "b"]
    assert studio.made == [("a",), ("b",)]


def test_without_a_cache_delivered_pixels_are_made_again_for_later_requests(ask: Ask, studio: Studio) -> None:
    studio.door.set()
    for number in range(3):
        assert ask(str(number), "a").await_heard(1) == ["a"]
    assert studio.made == [("a",)] * 3


def test_a_picture_and_its_crops_are_made_together_and_several_pictures_apart(ask: Ask, studio: Studio) -> None:
    studio.door.set()
    assert ask("first", "a", "a/1", "b", "a/2").await_heard(4) == ["a", "a/1", "a/2", "b"]
    assert studio.made == [("a", "a/1", "a/2"), ("b",)]


def test_pixels_wanted_by_four_frontends_with_one_store_are_made_by_one(studio: Studio) -> None:
    name = f"{7:064x}"
    with RunDirectory.create() as directory, ExitStack() as closing:
        pools = [MediaPool(1, StoreCache(SharedStore(directory.path, 1 << 20))) for _ in range(4)]
        for pool in pools:
            closing.callback(pool.close)
        askers = [Asker(pool, studio, str(number)).ask(name) for number, pool in enumerate(pools)]
        studio.await_begun()
        studio.door.set()
        for asker in askers:
            assert asker.await_heard(1) == [name]
        assert studio.made == [(name,)]
        assert sum(counted(pool, DECODED)[0] for pool in pools) == 1
        answers = [asker.answered_by(name) for asker in askers]
        assert sorted(answers) == [["nobody"], ["processor"], ["processor"], ["processor"]]
        assert [each == ["nobody"] for each in answers] == [counted(pool, DECODED) == [1] for pool in pools]


MAKER = """
from keepsight.ipc import shared_store
with shared_store.SharedStore(folder, 1 << 20).making(sys.argv[2:]):
    print("stopped", flush=True)
    time.sleep(600)
"""


def test_a_frontend_stopped_while_making_pictures_delays_no_other(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "_PATIENCE_SECONDS", 0.02)
    studio.door.set()
    *names, another = [f"{number:064x}" for number in range(4)]
    with RunDirectory.create() as directory, stopped_process(MAKER, directory.path, *names, another):
        pool = MediaPool(1, StoreCache(SharedStore(directory.path, 1 << 20)))
        asker = Asker(pool, studio, "first").ask(*names)
        assert asker.await_heard(3) == names
        Asker(pool, studio, "second").ask(another)
        pool.close()


def test_parts_that_evict_one_another_from_a_small_store_are_sent_as_pixels(studio: Studio) -> None:
    parts = [f"{number:064x}" for number in range(3)]
    delivered: dict[str, Any] = {}
    prepared: Any = FakePrepared("one", studio)
    studio.door.set()
    with RunDirectory.create() as directory:
        pool = MediaPool(1, StoreCache(SharedStore(directory.path, mmap.PAGESIZE)))  # there is room for one
        pool.make(prepared, parts, delivered.__setitem__, break_down)
        wait_until(lambda: len(delivered) == 3)
        pool.close()
    assert [isinstance(delivered[each], np.ndarray) for each in parts] == [True, True, False]
    assert studio.made == [tuple(parts)]


def test_only_pixels_not_yet_being_made_are_begun(ask: Ask, studio: Studio) -> None:
    first, second = ask("first", "a", "a/1"), ask("second", "a/1", "a/2")
    studio.door.set()
    assert first.await_heard(2) == ["a", "a/1"]
    assert second.await_heard(2) == ["a/1", "a/2"]
    assert studio.made == [("a", "a/1"), ("a/2",)]


def test_a_request_that_joins_a_job_counts_a_hit_and_its_starter_a_miss(ask: Ask, studio: Studio) -> None:
    first, second = ask("first", "a", "a/1"), ask("second", "a/1", "a/2")
    studio.door.set()
    first.await_heard(2)
    second.await_heard(2)
    assert first.answered_by("a", "a/1") == ["nobody", "nobody"]
    assert second.answered_by("a/1", "a/2") == ["processor", "nobody"]


def test_a_failure_reaches_each_waiting_request_once_with_its_own_error(ask: Ask, studio: Studio) -> None:
    studio.error = ValueError("damaged")
    first = ask("first", "a", "a/1", "b")
    studio.await_begun()
    second, third = ask("second", "a/1"), ask("third", "c")
    studio.door.set()
    assert str(first.await_heard(1)[0]) == "first a: damaged"
    assert str(second.await_heard(1)[0]) == "second a/1: damaged"
    assert str(third.await_heard(1)[0]) == "third c: damaged"
    assert [len(each.heard) for each in (first, second, third)] == [1, 1, 1]
    assert studio.made == [("a", "a/1"), ("c",)], "the rest of a request that failed is not made"


def test_a_failure_is_not_remembered(ask: Ask, studio: Studio) -> None:
    studio.door.set()
    studio.error = ValueError("damaged")
    assert isinstance(ask("first", "a").await_heard(1)[0], ValueError)
    studio.error = None
    assert ask("second", "a").await_heard(1) == ["a"]


def test_pixels_that_no_request_waits_for_any_more_are_not_begun(ask: Ask, studio: Studio) -> None:
    running, leaving, staying = ask("running", "a"), ask("leaving", "b", "c", "c/1"), ask("staying", "c", "d")
    studio.await_begun()
    leaving.forget()
    studio.door.set()
    assert staying.await_heard(2) == ["c", "d"]
    assert running.await_heard(1) == ["a"]
    assert studio.made == [("a",), ("c",), ("d",)]
    assert leaving.heard == []


def test_others_are_served_when_the_request_that_began_the_job_leaves(ask: Ask, studio: Studio) -> None:
    first = ask("first", "a", "b")
    studio.await_begun()
    second = ask("second", "a", "b")
    first.forget()
    third = ask("third", "a")
    studio.door.set()
    assert second.await_heard(2) == ["a", "b"]
    assert third.await_heard(1) == ["a"]
    assert first.heard == []
    assert studio.made == [("a",), ("b",)]


def test_a_request_that_returns_while_its_pixels_are_made_is_served_once(ask: Ask, studio: Studio) -> None:
    first = ask("first", "a")
    studio.await_begun()
    first.forget()
    first.ask("a")
    first.ask("a")
    studio.door.set()
    assert first.await_heard(1) == ["a"]
    assert ask("second", "b").await_heard(1) == ["b"]
    assert first.heard == ["a"]
    assert studio.made == [("a",), ("b",)]


def test_cancelled_pixels_can_be_requested_again(ask: Ask, studio: Studio) -> None:
    ask("running", "a")
    studio.await_begun()
    ask("leaving", "b").forget()
    again = ask("again", "b")
    studio.door.set()
    assert again.await_heard(1) == ["b"]
    assert studio.made == [("a",), ("b",)]


def is_interrupted(line: int, method: str, call: Callable[[], object]) -> bool:
    """Call, and raise KeyboardInterrupt like Ctrl-C at the given line of those that a method, with all it calls, runs.

    Return False if it has fewer lines. Python itself raises it in fewer places than between any two lines.
    """
    files, lines = {media_pool.__file__, media_waiters.__file__}, count()
    outermost: FrameType | None = None

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal outermost
        if outermost is None and frame.f_code.co_name == method:
            outermost = frame
        if outermost is None or frame.f_code.co_filename not in files:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        if event == "return" and frame is outermost:
            sys.settrace(None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_pictures_whose_first_request_was_interrupted_are_made_for_the_next() -> None:
    for line in count():
        studio = Studio()
        with open_pool(studio) as pool:
            interrupted = Asker(pool, studio, "interrupted")
            if not is_interrupted(line, "_queue_new", partial(interrupted.ask, "a", "a/1", "F")):
                break
            interrupted.forget()
            following = Asker(pool, studio, "next").ask("a", "a/1", "F")
            studio.door.set()
            assert following.await_heard(3) == ["F", "a", "a/1"], line
    assert line > 10


def test_pictures_of_a_request_that_was_interrupted_while_it_left_are_made_for_the_next() -> None:
    for line in count():
        studio = Studio()
        with open_pool(studio) as pool:
            Asker(pool, studio, "running").ask("b")
            studio.await_begun()
            interrupted = Asker(pool, studio, "interrupted").ask("a", "a/1")
            if not is_interrupted(line, "_drop_waiter", interrupted.forget):
                break
            following = Asker(pool, studio, "next").ask_unchecked("a", "a/1")
            studio.door.set()
            assert following.await_heard(2) == ["a", "a/1"], line
    assert line > 10


def test_leaving_does_not_look_at_pictures_of_other_requests(pool: MediaPool, studio: Studio, ask: Ask) -> None:
    looked_at: list[str] = []

    class Noted(str):
        def __hash__(self) -> int:
            looked_at.append(str(self))
            return super().__hash__()

    ask("running", "a")
    studio.await_begun()
    for number in range(9):
        ask(f"{number}", Noted("b"), Noted(f"c{number}"))
    looked_at.clear()
    pool.forget("text")
    assert looked_at == []
    pool.forget("4")
    assert set(looked_at) == {"b", "c4"}
    pool.check_invariants()


def test_a_cancelled_request_is_released(pool: MediaPool, studio: Studio, ask: Ask) -> None:
    ask("running", "a")
    studio.await_begun()
    leaving = ask("leaving", "b")
    prepared = weakref.ref(leaving.prepared)
    leaving.forget()
    del leaving
    gc.collect()
    assert prepared() is None


def test_as_many_pictures_are_made_at_a_time_as_there_are_workers(studio: Studio) -> None:
    with open_pool(studio, num_workers=3) as pool:
        asker = Asker(pool, studio, "first").ask("a", "b", "c", "d")
        studio.await_begun(3)
        assert not studio.begun.acquire(timeout=0.05)
        studio.door.set()
        assert asker.await_heard(4) == ["a", "b", "c", "d"]


def test_no_picture_waits_for_films_and_no_film_for_pictures(ask: Ask, studio: Studio) -> None:
    films, pictures = ask("first", "F", "G"), ask("second", "a", "b")
    studio.await_begun(2)
    assert sorted(studio.made) == [("F",), ("a",)]
    films.forget()
    studio.door.set()
    assert pictures.await_heard(2) == ["a", "b"]
    assert ("G",) not in studio.made


def test_without_a_cache_pixels_that_were_delivered_are_not_kept(pool: MediaPool, studio: Studio) -> None:
    studio.door.set()
    delivered = threading.Event()
    pixels: list[weakref.ref[Pixels]] = []

    def deliver(_media_hash: str, array: Any) -> None:
        pixels.append(weakref.ref(array))
        delivered.set()

    prepared: Any = FakePrepared("first", studio)
    pool.make(prepared, ["a"], deliver, lambda error: pytest.fail(str(error)))
    assert delivered.wait(SOON)
    assert Asker(pool, studio, "second").ask("b").await_heard(1) == ["b"]  # so the only thread is done with the first
    gc.collect()
    assert pixels[0]() is None


def test_a_failed_delivery_does_not_affect_the_others(
    pool: MediaPool, studio: Studio, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    prepared: Any = FakePrepared("broken", studio)
    pool.make(prepared, ["a"], break_down, break_down)
    other = ask("other", "a")
    studio.door.set()
    assert other.await_heard(1) == ["a"]
    assert ask("later", "b").await_heard(1) == ["b"]
    assert "could not be delivered" in caplog.text


def test_after_closing_nothing_is_delivered_or_begun(studio: Studio) -> None:
    with open_pool(studio, num_workers=1) as pool:
        asker = Asker(pool, studio, "first").ask("a", "b")
        studio.await_begun()
        closing = threading.Thread(target=pool.close)
        closing.start()
        wait_until(lambda: not pool._waiters)
        assert closing.is_alive(), "it waits for what has begun"
        studio.door.set()
        closing.join(SOON)
        assert not closing.is_alive()
    assert asker.heard == []
    assert studio.made == [("a",)]


@pytest.mark.parametrize("num_kept", [0, 2, 100])
def test_many_threads_that_ask_and_leave_get_what_they_wait_for(studio: Studio, num_kept: int) -> None:
    studio.door.set()
    names = [f"{picture}{part}" for picture in "abc" for part in ("", "/1")]
    with open_pool(studio, num_workers=4, max_cache_bytes=num_kept * BYTES) as pool:

        def come_and_go(number: int) -> None:
            for turn in range(100):
                asker = Asker(pool, studio, f"{number} {turn}").ask(*names[turn % 4 :])
                if (turn + number) % 3:
                    assert set(asker.await_heard(len(names) - turn % 4)) == set(names[turn % 4 :])
                asker.forget()

        failures: list[BaseException] = []

        def run(number: int) -> None:
            try:
                come_and_go(number)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * SOON)
        assert not any(thread.is_alive() for thread in threads)
        assert not failures
        if num_kept == 100:
            assert counted(pool, PREPROCESSED) == [len(names)]


# The cache ----------------------------------------------------------------------------------------------------


def test_held_pixels_are_delivered_without_being_made_again(studio: Studio) -> None:
    studio.door.set()
    with open_pool(studio, max_cache_bytes=2 * BYTES) as pool:
        for number in range(3):
            assert Asker(pool, studio, str(number)).ask("a", "a/1").await_heard(2) == ["a", "a/1"]
        assert studio.made == [("a", "a/1")]
        assert counted(pool, DECODED, PREPROCESSED) == [1, 2]


def test_held_pixels_are_delivered_while_every_worker_is_busy(studio: Studio) -> None:
    with open_pool(studio, max_cache_bytes=9 * BYTES) as pool:
        studio.door.set()
        Asker(pool, studio, "first").ask("a").await_heard(1)
        studio.door.clear()
        second = Asker(pool, studio, "second").ask("b", "a", "c")
        assert second.heard == ["a"]
        studio.door.set()
        assert second.await_heard(3) == ["a", "b", "c"]
        assert studio.made == [("a",), ("b",), ("c",)]


def test_a_request_s_pixels_do_not_evict_one_another(studio: Studio) -> None:
    studio.door.set()
    with open_pool(studio, max_cache_bytes=2 * BYTES) as pool:
        Asker(pool, studio, "first").ask("a").await_heard(1)
        Asker(pool, studio, "second").ask("x").await_heard(1)
        both = Asker(pool, studio, "both")
        both.prepared.media_hashes = ("a", "b")
        both.ask("b").await_heard(1)
        both.ask("a").await_heard(2)
        assert studio.made == [("a",), ("x",), ("b",)]


def test_the_cache_stays_within_its_size_and_evicts_the_oldest(studio: Studio) -> None:
    studio.door.set()
    with open_pool(studio, max_cache_bytes=2 * BYTES + 1) as pool:
        for number, name in enumerate("abcbca"):
            Asker(pool, studio, str(number)).ask(name).await_heard(1)
        assert studio.made == [("a",), ("b",), ("c",), ("a",)]


def test_pixels_larger_than_the_cache_are_delivered_and_not_kept(studio: Studio) -> None:
    studio.door.set()
    with open_pool(studio, max_cache_bytes=BYTES - 1) as pool:
        for number in range(2):
            assert Asker(pool, studio, str(number)).ask("a").await_heard(1) == ["a"]
        assert studio.made == [("a",)] * 2


def test_a_failure_is_never_cached(studio: Studio) -> None:
    studio.door.set()
    studio.error = ValueError("damaged")
    with open_pool(studio, max_cache_bytes=9 * BYTES) as pool:
        assert isinstance(Asker(pool, studio, "first").ask("a").await_heard(1)[0], ValueError)
        assert counted(pool, DECODED, PREPROCESSED) == [0, 0]
        studio.error = None
        assert Asker(pool, studio, "second").ask("a").await_heard(1) == ["a"]


def test_pixels_whose_request_left_are_kept_for_the_next(studio: Studio) -> None:
    with open_pool(studio, max_cache_bytes=9 * BYTES) as pool:
        leaving = Asker(pool, studio, "leaving").ask("a")
        studio.await_begun()
        leaving.forget()
        studio.door.set()
        Asker(pool, studio, "other").ask("b").await_heard(1)  # so the only thread is done with the first
        assert Asker(pool, studio, "next").ask("a").await_heard(1) == ["a"]
        assert studio.made == [("a",), ("b",)]


def test_after_a_reset_pixels_are_made_again(studio: Studio) -> None:
    studio.door.set()
    with open_pool(studio, max_cache_bytes=9 * BYTES) as pool:
        Asker(pool, studio, "first").ask("a").await_heard(1)
        pool.reset_cache()
        Asker(pool, studio, "second").ask("a").await_heard(1)
        assert studio.made == [("a",)] * 2


def test_a_cached_view_does_not_keep_its_base_array(studio: Studio) -> None:
    large = np.zeros((100, 100, 3), np.uint8)
    delivered: list[Pixels] = []
    with open_pool(studio, max_cache_bytes=BYTES) as pool:
        prepared: Any = FakePrepared("first", studio)
        prepared.pixels_of = lambda *_: {"a": large[:1, :1]}
        heard = threading.Semaphore(0)

        def deliver(_media_hash: str, pixels: Any) -> None:
            delivered.append(pixels)
            heard.release()

        for _ in range(2):
            pool.make(prepared, ["a"], deliver, break_down)
            assert heard.acquire(timeout=SOON)
    first, second = delivered
    assert first is second
    assert not np.shares_memory(first, large)
    assert not first.flags.writeable


def test_a_pool_that_is_closed_holds_nothing(studio: Studio) -> None:
    studio.door.set()
    kept: list[weakref.ref[Any]] = []
    with open_pool(studio, max_cache_bytes=9 * BYTES) as pool:
        Asker(pool, studio, "first").ask("a").await_heard(1)
        prepared: Any = FakePrepared("second", studio)
        pool.make(prepared, ["a"], lambda _, pixels: kept.append(weakref.ref(pixels)), break_down)
        assert kept[0]() is not None
    gc.collect()
    assert kept[0]() is None


@pytest.mark.parametrize("source", [film(), drawn_frames()], ids=["file", "array"])
def test_closing_waits_for_no_film_to_be_made(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, source: bytes | Pixels
) -> None:
    class ByJob(FakePrepared):
        def pixels_of(self, media_hashes: Collection[str], make: MakePixels = run_job) -> dict[str, Pixels]:
            config = ImageProcessorConfig(height=HEIGHT, width=WIDTH)
            return make(FilmJob(source, "", {"A": Moment(0, 19), "AB": Moment(9, 10)}, config)).pixels

    def resize(rgb: Pixels, _: ImageProcessorConfig) -> Pixels:
        studio.work([])
        return rgb

    monkeypatch.setattr(preprocess_image, "resize_pixels", resize)
    pool = MediaPool(1)
    asker = Asker(pool, studio, "0")
    asker.prepared = ByJob("0", studio)
    asker.ask("A", "AB")
    studio.await_begun()
    closing = threading.Thread(target=pool.close)
    closing.start()
    wait_until(lambda: pool._films.threads._shutdown)
    studio.door.set()
    closing.join(SOON)
    assert not closing.is_alive()
    assert (len(studio.made), asker.heard) == (1, [])


def test_media_that_an_engine_found_itself_count_as_saved_time(studio: Studio) -> None:
    class ByJob(FakePrepared):
        def pixels_of(self, media_hashes: Collection[str], make: MakePixels = run_job) -> dict[str, Pixels]:
            return make(PictureJob(b"", "", dict.fromkeys(media_hashes), ImageProcessorConfig())).pixels

    studio.door.set()
    counters = Counters()
    # Of all the time that the job takes, the worker decodes and resizes for these seconds.
    worked = (1e-9, 2e-9)
    pool = MediaPool(1, LocalCache(9 * BYTES), lambda job: Made(studio.work(job.parts), worked), counters=counters)
    asker = Asker(pool, studio, "0")
    asker.prepared = ByJob("0", studio, account=RequestAccount("0", [ShownItem("a", 1)], 1))
    asker.ask("a").await_heard(1)
    item = MediaItem("a", TokenSpan(0, 1), Geometry(1, 1))
    pool.note_spared([item])
    assert counted(pool, PROCESSOR.saved_seconds) == [pytest.approx(3e-9)]
    pool.note_spared([item, item])
    assert counted(pool, PROCESSOR.saved_seconds) == [pytest.approx(9e-9)]
    pool.close()


def test_a_verified_hit_is_made_again_and_served(studio: Studio) -> None:
    studio.door.set()
    with open_pool(studio, max_cache_bytes=9 * BYTES, verify_hits=1) as pool:
        for number in range(3):
            assert Asker(pool, studio, str(number)).ask("a").await_heard(1) == ["a"]
        assert studio.made == [("a",)] * 3
        assert counted(pool, VERIFIED, MISMATCHED) == [2, 0]


def test_a_hit_that_fails_verification_is_dropped_and_logged(studio: Studio, caplog: pytest.LogCaptureFixture) -> None:
    cache, delivered, heard = LocalCache(9 * BYTES), list[Any](), threading.Semaphore(0)
    cache.put("a", np.ones((1, 1, 3), np.uint8))
    studio.door.set()

    def deliver(_media_hash: str, pixels: object) -> None:
        delivered.append(pixels)
        heard.release()

    pool = MediaPool(1, cache, verify_hits=1)
    prepared: Any = FakePrepared("first", studio)
    pool.make(prepared, ["a"], deliver, break_down)
    assert heard.acquire(timeout=SOON)
    held = cache.read("a")
    pool.close()
    assert counted(pool, VERIFIED, MISMATCHED) == [1, 1]
    assert held is not None
    assert not held.any()
    assert not delivered[0].any()
    assert "OTHER PIXELS under a" in caplog.text


def test_a_request_for_the_pixels_themselves_gets_no_reference_to_a_store(studio: Studio) -> None:
    class Places(LocalCache):
        def put(self, media_hash: str, pixels: Pixels) -> Any:
            super().put(media_hash, pixels)
            return f"place of {media_hash}"

        def get_and_update(self, media_hash: str) -> Any:
            return None if self.read(media_hash) is None else f"place of {media_hash}"

        def read(self, media_hash: str) -> Pixels | None:
            return super().get_and_update(media_hash)

    delivered, heard = list[Any](), threading.Semaphore(0)

    def deliver(_media_hash: str, pixels: object) -> None:
        delivered.append(pixels)
        heard.release()

    studio.door.set()
    pool = MediaPool(1, Places(9 * BYTES))
    for number, inline in enumerate((False, False, True)):
        prepared: Any = FakePrepared(str(number), studio)
        pool.make(prepared, ["a"], deliver, break_down, inline=inline)
        assert heard.acquire(timeout=SOON)
    pool.close()
    assert delivered[:2] == ["place of a"] * 2
    assert isinstance(delivered[2], np.ndarray)
    assert studio.made == [("a",)]


# Pictures sent by uuid only, and what is learned from pixels ------------------------------------------------------


def test_an_unknown_uuid_is_refused_at_once_and_affects_no_other_request(studio: Studio) -> None:
    with open_pool(studio) as pool:
        Asker(pool, studio, "busy").ask("z")
        studio.await_begun()
        without = Asker(pool, studio, "without", "a").ask("b", "a")
        [refusal] = without.await_heard(1)
        assert isinstance(refusal, LookupError)
        having = Asker(pool, studio, "having").ask("a")
        studio.door.set()
        assert having.await_heard(1) == ["a"]
        assert studio.made == [("z",), ("a",)]
        assert len(without.heard) == 1


def test_a_uuid_alone_shares_pixels_held_or_being_made_for_another_request(studio: Studio) -> None:
    with open_pool(studio, max_cache_bytes=9 * BYTES, verify_hits=1) as pool:
        having = Asker(pool, studio, "having").ask("a")
        studio.await_begun()
        early = Asker(pool, studio, "early", "a").ask("a")
        studio.door.set()
        assert having.await_heard(1) == early.await_heard(1) == ["a"]
        assert Asker(pool, studio, "late", "a").ask("a").await_heard(1) == ["a"]
        # A hit is not checked if the request lacks the content to make it again.
        assert studio.made == [("a",)]


def test_made_pixels_are_learned_before_delivery_and_held_ones_are_not(studio: Studio) -> None:
    studio.door.set()
    with open_pool(studio, max_cache_bytes=9 * BYTES) as pool:
        first, second = Asker(pool, studio, "first"), Asker(pool, studio, "second")
        learned_when_heard: list[list[str]] = []
        prepared: Any = first.prepared
        delivered = threading.Event()

        def deliver(_media_hash: str, _pixels: object) -> None:
            learned_when_heard.append(list(first.prepared.learned))
            delivered.set()

        pool.make(prepared, ["a"], deliver, break_down)
        assert delivered.wait(SOON)
        assert learned_when_heard == [["a"]]
        assert second.ask("a").await_heard(1) == ["a"]
        assert second.prepared.learned == []


def test_queries_hits_and_evictions_are_counted(studio: Studio) -> None:
    studio.door.set()
    counters = Counters()
    pool = MediaPool(1, LocalCache(2 * BYTES), counters=counters)
    try:
        for number, media_hash in enumerate(("a", "a", "b", "c")):
            Asker(pool, studio, str(number)).ask(media_hash).await_heard(1)
    finally:
        pool.close()
    slots = (PROCESSOR.queries, PROCESSOR.hits, PROCESSOR.evictions, DECODED, PREPROCESSED)
    assert counted(pool, *slots) == [4, 1, 1, 3, 3]
    assert counted(pool, PROCESSOR.entries, PROCESSOR.num_bytes) == [2, 2 * BYTES]


def test_without_a_cache_no_queries_are_counted(studio: Studio) -> None:
    studio.door.set()
    counters = Counters()
    pool = MediaPool(1, open_pixel_cache("none", Config()), counters=counters)
    try:
        Asker(pool, studio, "r").ask("a").await_heard(1)
    finally:
        pool.close()
    assert counted(pool, PROCESSOR.queries, PROCESSOR.budget_bytes, DECODED) == [0, 0, 1]


def test_films_are_counted_as_videos(studio: Studio) -> None:
    studio.door.set()
    pool = MediaPool(1, LocalCache(9 * BYTES))
    try:
        for number, media_hash in enumerate(("A", "A", "A", "a")):
            Asker(pool, studio, str(number)).ask(media_hash).await_heard(1)
    finally:
        pool.close()
    of_films, of_pictures = (
        [slots[modality] for slots in (PROCESSOR.queries, PROCESSOR.hits, DECODED, PREPROCESSED)]
        for modality in ("video", "image")
    )
    assert counted(pool, *of_films, *of_pictures) == [3, 2, 1, 1, 1, 0, 1, 1]


@dataclass
class MadeByJob(MadeUpRequest):
    source: bytes | Embeds = b""

    def modality_of(self, media_hash: str) -> Modality:
        return "image_embeds" if isinstance(self.source, Embeds) else super().modality_of(media_hash)

    def pixels_of(self, media_hashes: Collection[str], make: MakePixels = run_job) -> dict[str, Pixels]:
        return make(PictureJob(self.source, "picture", dict.fromkeys(media_hashes), ImageProcessorConfig())).pixels


def test_embeddings_are_not_counted_as_decoded_or_resized() -> None:
    asked, arrived = MadeByJob(make_request("r", "a"), Embeds(np.zeros((6, 8), np.float32))), threading.Event()
    pool = MediaPool(1)
    pool.make(cast(PreparedRequest, asked), ["a"], lambda *_: arrived.set(), break_down)
    assert arrived.wait(SOON)
    # The time that embeddings took is no estimate of what making a picture takes.
    pool.note_spared(asked.engine_request.media)
    pool.close()
    assert (asked.account.spans, asked.account.describe().work) == ([], dict.fromkeys(WORK, 0))
    assert counted(pool, DECODED, PREPROCESSED, PROCESSOR.saved_seconds) == [0, 0, 0]


@pytest.mark.parametrize("reported", [(0.0, 0.0), (-1.0, 0.0), (1e9, 0.0), (0.0, float("nan"))])
def test_times_reported_by_a_worker_are_clamped_to_the_elapsed_time(reported: tuple[float, float]) -> None:
    def make(job: MakingJob) -> Made:
        return Made({media_hash: pixels_like(media_hash) for media_hash in job.parts}, reported)

    asked, arrived = MadeByJob(make_request("r", "a")), threading.Event()
    pool, began = MediaPool(1, make_pixels=make), time.monotonic()
    pool.make(cast(PreparedRequest, asked), ["a"], lambda *_: arrived.set(), break_down)
    assert arrived.wait(SOON)
    pool.close()
    decode, resize = asked.account.spans
    assert (decode.stage, resize.stage) == ("decode", "resize")
    assert began <= decode.began <= decode.ended == resize.began <= resize.ended <= time.monotonic()
