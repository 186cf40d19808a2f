"""Caches the content of URLs: revalidated only when the origin requires it, downloaded again only when it changed.

Concurrent requests for a URL share one download. Tenants never see each other's entries: a record is found only under
the salt that it was made under. Bodies are stored by digest, once for all URLs of one picture, and never exceed the
cache's bytes. Belongs to one event loop; its clock is injected.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

from keepsight.frontend.intake.fetch_url import Fetched
from keepsight.frontend.intake.http_caching import Validators
from keepsight.frontend.intake.web_url import UrlFault, parse_web_url
from keepsight.lru_cache import LruCache
from keepsight.media import Modality

Fetch = Callable[[str, Validators | None], Awaitable[Fetched]]
# The salt's digest, as a salt may have any length, and the URL in its normalized spelling.
Key = tuple[bytes, str]
MAX_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class _Record:
    digest: bytes
    validators: Validators
    fresh_until: float


class _Held(NamedTuple):
    record: _Record
    content: bytes


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[bytes]
    num_waiting: int = 0


class UrlCache:
    def __init__(self, fetch: Fetch, max_bytes: int, clock: Callable[[], float]) -> None:
        """If `max_bytes` is 0, nothing is kept."""
        self._fetch, self._clock = fetch, clock
        self._bodies = LruCache[bytes, bytes](max_bytes, len) if max_bytes else None
        # The least recently used first.
        self._records: OrderedDict[Key, _Record] = OrderedDict()
        self._flights: dict[Key, _Flight] = {}
        # Called for each body that was downloaded.
        self.on_fetched: Callable[[Modality], object] = lambda _modality: None

    async def get(self, url: str, cache_salt: str | None, modality: Modality = "image") -> bytes:
        """Return the content of a URL. All waiting callers get the same UrlFault; failures are not kept.

        Only who began a download is told that it took too long: the time of the others began later. They try again;
        each caller limits its own time. `modality` is only passed on to `on_fetched`.
        """
        key = (_digest_of(cache_salt), str(parse_web_url(url)))
        if (held := self._find(key)) is not None and self._clock() < held.record.fresh_until:
            return held.content
        while (flight := self._flights.get(key)) is not None and not flight.task.done():
            try:
                return await self._wait(key, flight)
            except UrlFault as fault:
                if not fault.is_timeout:
                    raise
        return await self._wait(key, self._begin(key, url, modality))

    async def _wait(self, key: Key, flight: _Flight) -> bytes:
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting:
                self._end(key, flight)

    def check_invariants(self) -> None:
        assert len(self._records) <= MAX_RECORDS
        assert all(flight.num_waiting > 0 for flight in self._flights.values())
        if self._bodies is not None:
            self._bodies.check_invariants()

    def _begin(self, key: Key, url: str, modality: Modality) -> _Flight:
        flight = self._flights[key] = _Flight(asyncio.create_task(self._load(key, url, modality)))
        return flight

    def _end(self, key: Key, flight: _Flight) -> None:
        """Remove a flight for which no caller waits: it is finished, or its result is no longer needed."""
        flight.task.cancel()
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _load(self, key: Key, url: str, modality: Modality) -> bytes:
        began = self._clock()  # the origin may have answered at once, and sent the body for long
        held = self._find(key)
        fetched = await self._fetch(url, None if held is None else held.record.validators)
        if fetched.content is None:
            assert held is not None, "not modified, of which nothing was known"
            content, digest = held.content, held.record.digest
        else:
            self.on_fetched(modality)
            content, digest = fetched.content, blake3(fetched.content).digest()
        self._keep(key, fetched, content, digest, began)
        return content

    def _find(self, key: Key) -> _Held | None:
        record = self._records.get(key)
        if record is None or self._bodies is None:
            return None
        self._records.move_to_end(key)
        content = self._bodies.get_and_update(record.digest)
        return None if content is None else _Held(record, content)

    def _keep(self, key: Key, fetched: Fetched, content: bytes, digest: bytes, began: float) -> None:
        self._records.pop(key, None)
        if self._bodies is None or not fetched.freshness.may_be_kept:
            return
        if self._bodies.put_if_fits(digest, content):
            self._records[key] = _Record(digest, fetched.validators, began + fetched.freshness.seconds)
            while len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)


def _digest_of(cache_salt: str | None) -> bytes:
    return b"" if cache_salt is None else blake3(cache_salt.encode(errors="surrogatepass")).digest()
