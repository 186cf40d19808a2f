"""Which requests reach the origin, and when: with a scripted origin and a clock that only the test moves."""

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest

from keepsight.errors import MediaFetchError, MediaTimeoutError
from keepsight.frontend.intake import url_cache
from keepsight.frontend.intake.fetch_url import Fetched
from keepsight.frontend.intake.http_caching import Freshness, Validators
from keepsight.frontend.intake.url_cache import UrlCache
from keepsight.frontend.intake.web_url import UrlFault
from keepsight.media import Modality

URL = "http://pictures.test/a"
A_MINUTE = Freshness(60)


class Origin:
    """A scripted origin whose ETag is the URL's version; it records each request."""

    def __init__(self, freshness: Freshness) -> None:
        self.freshness = freshness
        self.versions: dict[str, bytes] = {URL: b"first"}
        self.asked: list[tuple[str, bool]] = []  # URL, and whether the request had a validator.
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_cancelled = self.num_fetched = self.num_revalidated = 0
        self.fault: UrlFault | None = None

    async def fetch(self, url: str, known: Validators | None) -> Fetched:
        self.asked.append((url, known is not None))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.fault is not None:
            raise self.fault
        version = self.versions[url]
        is_same = known is not None and known.etag == version.decode()
        self.num_fetched += not is_same
        self.num_revalidated += is_same
        return Fetched(None if is_same else version, Validators(url, version.decode(), None), self.freshness)


class Bench:
    def __init__(self, freshness: Freshness = A_MINUTE, max_bytes: int = 100) -> None:
        self.origin, self.now = Origin(freshness), 0.0
        self.cache = UrlCache(self.origin.fetch, max_bytes, lambda: self.now)

    async def get(self, url: str = URL, salt: str | None = None) -> bytes:
        content = await self.cache.get(url, salt)
        self.cache.check_invariants()
        return content

    @property
    def counts(self) -> tuple[int, int]:
        return self.origin.num_fetched, self.origin.num_revalidated


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(in_time())


def test_fresh_content_needs_no_request_and_stale_content_is_revalidated() -> None:
    async def test() -> None:
        bench = Bench()
        for bench.now in (0, 30, 59.9):
            assert await bench.get() == b"first"
        assert bench.origin.asked == [(URL, False)]
        for bench.now in (60, 61):  # The first of these renews it.
            assert await bench.get() == b"first"
        assert bench.origin.asked == [(URL, False), (URL, True)]
        assert bench.counts == (1, 1)

    run(test)


def test_what_changed_at_its_origin_is_never_served_again() -> None:
    async def test() -> None:
        bench = Bench(Freshness(0))
        assert await bench.get() == b"first"
        bench.origin.versions[URL] = b"second"
        for _ in range(3):
            assert await bench.get() == b"second"
        assert bench.counts == (2, 2)

    run(test)


@pytest.mark.parametrize("max_bytes", [0, 4, 100])
def test_uncacheable_content_is_downloaded_each_time(max_bytes: int) -> None:
    async def test() -> None:
        bench = Bench(Freshness(60, may_be_kept=max_bytes < 100), max_bytes)
        for _ in range(3):
            assert await bench.get() == b"first"
        assert bench.origin.asked == [(URL, False)] * 3

    run(test)


def test_cached_content_is_dropped_when_the_origin_says_so() -> None:
    async def test() -> None:
        bench = Bench(Freshness(0))
        await bench.get()
        bench.origin.freshness = Freshness(0, may_be_kept=False)
        await bench.get()
        await bench.get()
        assert bench.origin.asked == [(URL, False), (URL, True), (URL, False)]

    run(test)


def test_a_tenant_never_finds_what_another_fetched() -> None:
    async def test() -> None:
        bench = Bench()
        for salt in (None, "a", "b", "a"):
            assert await bench.get(salt=salt) == b"first"
        assert bench.origin.asked == [(URL, False)] * 3
        bench.origin.gate.clear()
        salts = ["c", "d", "c"]
        waiting = [asyncio.create_task(bench.get(salt=salt)) for salt in salts]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bench.origin.gate.set()
        await asyncio.gather(*waiting)
        assert len(bench.origin.asked) == 5, "tenants wait for one another's downloads"

    run(test)


@pytest.mark.parametrize("spelling", [f"{URL}#left", "HTTP://Pictures.Test/a", "http://pictures.test.:80/a"])
def test_another_spelling_of_a_url_asks_for_the_same(spelling: str) -> None:
    async def test() -> None:
        bench = Bench()
        bench.origin.versions[spelling] = b"first"
        assert [await bench.get(), await bench.get(spelling)] == [b"first"] * 2
        assert bench.counts == (1, 0)

    run(test)


def test_one_picture_under_many_urls_is_held_once() -> None:
    async def test() -> None:
        bench = Bench(max_bytes=9)
        urls = [f"{URL}?signature={number}" for number in range(20)]
        bench.origin.versions |= dict.fromkeys(urls, b"picture")
        for url in urls:
            await bench.get(url)
        assert bench.counts == (20, 0)
        for url in urls:
            await bench.get(url)
        assert bench.counts == (20, 0)

    run(test)


def test_a_record_takes_no_more_memory_for_a_longer_salt() -> None:
    async def test() -> None:
        bench = Bench()
        tracemalloc.start()
        await bench.get(salt="long" * 2**20)
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert num_bytes < 2**20

    run(test)


def test_bytes_and_records_that_are_kept_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(url_cache, "MAX_RECORDS", 3)
        bench = Bench(max_bytes=12)
        urls = [f"{URL}{number}" for number in range(6)]
        bench.origin.versions |= {url: b"body%d" % number for number, url in enumerate(urls)}
        for url in urls:
            await bench.get(url)
        await bench.get(urls[-1])
        await bench.get(urls[0])
        assert bench.counts == (7, 0)

    run(test)


def test_the_record_that_was_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(url_cache, "MAX_RECORDS", 2)
        bench = Bench()
        bench.origin.versions |= {f"{URL}{name}": name.encode() for name in "xyz"}
        for name in "xyxzx":
            await bench.get(URL + name)
        assert bench.counts == (3, 0)

    run(test)


# Single flight ------------------------------------------------------------------------------------------------


def test_fifty_concurrent_requests_share_one_download() -> None:
    async def test() -> None:
        bench = Bench(Freshness(0, may_be_kept=False))
        bench.origin.gate.clear()
        waiting = [asyncio.create_task(bench.get()) for _ in range(50)]
        await asyncio.sleep(0)
        bench.origin.gate.set()
        assert await asyncio.gather(*waiting) == [b"first"] * 50
        assert bench.counts == (1, 0)

    run(test)


def test_a_download_is_canceled_only_when_its_last_waiter_leaves() -> None:
    async def test() -> None:
        bench = Bench()
        bench.origin.gate.clear()
        first, second = (asyncio.create_task(bench.get()) for _ in range(2))
        while not bench.origin.asked:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert bench.origin.num_cancelled == 0
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        while not bench.origin.num_cancelled:
            await asyncio.sleep(0)
        bench.cache.check_invariants()
        bench.origin.gate.set()
        assert await bench.get() == b"first", "who comes afterwards begins anew"

    run(test)


def test_a_failure_is_raised_for_all_waiters_and_not_cached() -> None:
    async def test() -> None:
        bench = Bench()
        bench.origin.gate.clear()
        bench.origin.fault = UrlFault(MediaFetchError, "answered 500")
        waiting = [asyncio.create_task(bench.get()) for _ in range(3)]
        await asyncio.sleep(0)
        bench.origin.gate.set()
        assert set(await asyncio.gather(*waiting, return_exceptions=True)) == {bench.origin.fault}
        bench.origin.fault = None
        assert await bench.get() == b"first"

    run(test)


def test_who_joined_a_download_that_took_too_long_tries_again_and_only_who_began_it_fails() -> None:
    async def test() -> None:
        bench = Bench()
        bench.origin.gate.clear()
        bench.origin.fault = UrlFault(MediaTimeoutError, "was not downloaded in time")
        began, *joined = (asyncio.create_task(bench.get()) for _ in range(3))
        await asyncio.sleep(0)
        bench.origin.gate.set()
        with pytest.raises(UrlFault, match="in time"):
            await began
        bench.origin.fault = None
        assert await asyncio.gather(*joined) == [b"first"] * 2
        assert bench.origin.asked == [(URL, False)] * 2

    run(test)


def test_content_is_fresh_for_the_time_since_it_was_asked_for() -> None:
    async def test() -> None:
        bench = Bench(Freshness(60))
        bench.origin.gate.clear()
        first = asyncio.create_task(bench.get())
        while not bench.origin.asked:
            await asyncio.sleep(0)
        bench.now = 50
        bench.origin.gate.set()
        await first
        for bench.now in (59, 60):
            await bench.get()
        assert bench.origin.asked == [(URL, False), (URL, True)]

    run(test)


def test_content_evicted_during_its_revalidation_is_still_served() -> None:
    async def test() -> None:
        bench = Bench(Freshness(0), max_bytes=9)
        bench.origin.versions["http://b/"] = b"another"
        await bench.get()
        bench.origin.gate.clear()
        revalidating = asyncio.create_task(bench.get())
        while len(bench.origin.asked) < 2:
            await asyncio.sleep(0)
        other = asyncio.create_task(bench.get("http://b/"))
        while len(bench.origin.asked) < 3:
            await asyncio.sleep(0)
        bench.origin.gate.set()
        assert await revalidating == b"first"
        assert await other == b"another"
        assert bench.counts == (2, 1)

    run(test)


def test_watchers_are_told_of_downloads_and_not_of_cache_hits() -> None:
    async def run() -> int:
        bench, modalities = Bench(), list[Modality]()
        bench.cache.on_fetched = modalities.append
        for _ in range(3):
            await bench.get()
        return len(modalities)

    assert asyncio.run(run()) == 1
