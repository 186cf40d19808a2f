"""Which of several engines a request is given to: one that holds its media, unless that has far more to do than others.

Pure: knows neither connections nor threads.  What an engine holds is believed, by what it said and what it is at; a
wrong belief costs work that is done twice.  Invariant: of each engine, what is in flight is what was noted as sent and
not yet as ended.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from typing import TypeVar

from keepsight.frontend.media_hints import MediaHints
from keepsight.requests import EngineRequest

# What an answer without a limit, or with a high one, is taken to have.
TYPICAL_ANSWER_TOKENS = 256
# An engine that has so many tokens more in flight than twice the least busy one's is not asked for what it holds: a
# picture that everybody asks about shall come to be held by others too.
SLACK_TOKENS = 8192
# Prompts are compared as far as a power of two times this.
SHORTEST_PREFIX = 64
MAX_PREFIXES = 1 << 16


class EngineView:
    """What a frontend knows and believes of one engine.  Of what other frontends ask of it, only hints tell."""

    def __init__(self, rank: int = 0, *, takes_unasked: bool = True) -> None:
        """`takes_unasked`: whether it wants pixels that it did not ask for."""
        self.rank = rank
        self.hints = MediaHints() if takes_unasked else MediaHints(max_promises=0)
        self.num_tokens_in_flight = 0
        self._requests: dict[str, EngineRequest] = {}
        # Of requests in flight: their media are held, or about to be.
        self._media: Counter[str] = Counter()
        # Of requests sent, by name; the least recently sent first.
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    @property
    def request_ids(self) -> AbstractSet[str]:
        return self._requests.keys()

    def note_sent(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = request
        self._media.update(item.media_hash for item in request.media)
        self.num_tokens_in_flight += count_tokens(request)
        for name in name_prefixes(request):
            self._prefixes[name] = None
            self._prefixes.move_to_end(name)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)

    def note_ended(self, request_id: str) -> None:
        """And what it promised."""
        self.hints.forget(request_id)
        if (request := self._requests.pop(request_id, None)) is not None:
            self._media -= Counter(item.media_hash for item in request.media)
            self.num_tokens_in_flight -= count_tokens(request)

    def forget_prefixes(self) -> None:
        self._prefixes.clear()

    def count_held_media_tokens(self, request: EngineRequest) -> int:
        return sum(item.span.length for item in request.media if self._holds(item.media_hash))

    def count_prefix_tokens(self, names: Collection[int]) -> int:
        """Of the longest prefix that was sent to it, given the names of all, from the shortest on."""
        known = (SHORTEST_PREFIX << index for index, name in enumerate(names) if name in self._prefixes)
        return max(known, default=0)

    def _holds(self, media_hash: str) -> bool:
        return media_hash in self._media or self.hints.is_held(media_hash)

    def check_invariants(self) -> None:
        requests = self._requests.values()
        assert self.num_tokens_in_flight == sum(map(count_tokens, requests))
        assert self._media == Counter(item.media_hash for request in requests for item in request.media)
        assert len(self._prefixes) <= MAX_PREFIXES
        self.hints.check_invariants()


Engine = TypeVar("Engine", bound=EngineView)


def choose_engine(request: EngineRequest, engines: Collection[Engine], cache_key: str | None = None) -> Engine:
    """Media count first, then the key; then a prefix is worth as many tokens in flight as it has."""
    if len(engines) == 1:
        return next(iter(engines))
    limit = 2 * min(engine.num_tokens_in_flight for engine in engines) + SLACK_TOKENS
    prefixes = tuple(name_prefixes(request))

    def merit(engine: Engine) -> tuple[int, bytes, int]:
        work_ahead = engine.num_tokens_in_flight - engine.count_prefix_tokens(prefixes)
        affinity = _affinity(cache_key, request.cache_salt, engine.rank) if cache_key else b""
        return engine.count_held_media_tokens(request), affinity, -work_ahead

    merits = {engine: merit(engine) for engine in engines if engine.num_tokens_in_flight <= limit}
    most = max(merits.values())
    best = [engine for engine, its in merits.items() if its == most]
    if len(best) == 1:
        return best[0]
    # Were it always the first, the caches of the others would stay empty where requests do not overlap.
    beginning = request.media[0].media_hash if request.media else repr(request.token_ids[:SHORTEST_PREFIX])
    return max(best, key=lambda engine: _affinity(beginning, request.cache_salt, engine.rank))


def _affinity(name: str, cache_salt: str | None, rank: int) -> bytes:
    """The same in every frontend, and nothing to be kept: where an engine is missing, only its own names move."""
    return hashlib.sha256(repr((name, cache_salt, rank)).encode()).digest()


def count_tokens(request: EngineRequest) -> int:
    """That it is taken to cost."""
    params = request.sampling_params
    answer = min(params.max_tokens or TYPICAL_ANSWER_TOKENS, TYPICAL_ANSWER_TOKENS)
    return len(request.token_ids) + params.n * answer


def name_prefixes(request: EngineRequest) -> Iterator[int]:
    """Of its first 64 tokens, 128, 256 ...: equal where all that these depend on is equal; hardly ever otherwise."""
    name, start, end = hash((request.cache_salt, request.adapter)), 0, SHORTEST_PREFIX
    while end <= len(request.token_ids):
        media = tuple(item.media_hash for item in request.media if start <= item.span.start < end)
        name = hash((name, request.token_ids[start:end], media))
        yield name
        start, end = end, 2 * end
