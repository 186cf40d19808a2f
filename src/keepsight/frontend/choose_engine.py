"""Chooses which of several engines gets a request: one that holds its media, unless it is far busier than the others.

Pure: no connections, no threads. An engine's holdings are estimated from its messages and the requests it is working
on; a wrong estimate only costs duplicate work, unless it is about media that cannot be made. Invariant: an engine's
requests in flight are exactly those noted as sent and not yet as ended.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from typing import TypeVar

from keepsight.choose_by_merit import Merit, choose_by_merit, rendezvous
from keepsight.frontend.media_hints import MediaHints
from keepsight.requests import EngineRequest

# Assumed length of an answer that has no limit or a higher one.
TYPICAL_ANSWER_TOKENS = 256
# An engine with this many tokens in flight beyond twice the least busy engine's is skipped, whatever it holds.
SLACK_TOKENS = 8192
# Prompt prefixes are compared at lengths of this times a power of two.
SHORTEST_PREFIX = 64
MAX_PREFIXES = 1 << 16


class EngineView:
    """A frontend's view of one engine. Requests of other frontends show up only through hints."""

    def __init__(self, rank: int = 0, *, accepts_unrequested_pixels: bool = True) -> None:
        """`accepts_unrequested_pixels`: whether the engine wants pixels that it did not ask for."""
        self.rank = rank
        self.hints = MediaHints() if accepts_unrequested_pixels else MediaHints(max_promises=0)
        self.num_tokens_in_flight = 0
        # Whether it has given no sign of life for long.
        self.is_silent = False
        self._requests: dict[str, EngineRequest] = {}
        # Media hashes of the requests in flight: the engine holds them, or soon will.
        self._media: Counter[str] = Counter()
        # Names of the prefixes of sent requests, the least recently sent first.
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
        """Remove the request, and the promises made for it."""
        self.hints.forget(request_id)
        if (request := self._requests.pop(request_id, None)) is not None:
            # `Counter.__isub__` would look at the media of all requests in flight.
            for item in request.media:
                self._media[item.media_hash] -= 1
                if not self._media[item.media_hash]:
                    del self._media[item.media_hash]
            self.num_tokens_in_flight -= count_tokens(request)

    def forget_prefixes(self) -> None:
        self._prefixes.clear()

    def count_held_media_tokens(self, request: EngineRequest) -> int:
        return sum(item.span.length for item in request.media if self.holds(item.media_hash))

    def count_prefix_tokens(self, names: Collection[int]) -> int:
        """Return the length of the longest prefix sent to this engine. `names`: the prefixes' names, shortest first."""
        known = (SHORTEST_PREFIX << index for index, name in enumerate(names) if name in self._prefixes)
        return max(known, default=0)

    def holds(self, media_hash: str) -> bool:
        """Return whether the engine is believed to hold it, or soon will."""
        return media_hash in self._media or self.hints.is_held(media_hash)

    def check_invariants(self) -> None:
        requests = self._requests.values()
        assert self.num_tokens_in_flight == sum(map(count_tokens, requests))
        assert dict(self._media) == Counter(item.media_hash for request in requests for item in request.media)
        assert len(self._prefixes) <= MAX_PREFIXES
        self.hints.check_invariants()


Engine = TypeVar("Engine", bound=EngineView)


def choose_engine(
    request: EngineRequest, engines: Collection[Engine], cache_key: str | None = None, unmakeable: Collection[str] = ()
) -> Engine:
    """Choose by held media, then by `cache_key`, then by load; a known prefix offsets as many tokens in flight.

    `unmakeable`: media whose pixels cannot be had here. Without them an engine that lacks them refuses the request,
    so one that has them gets it even if it is silent; else a silent one gets it only if all are.
    """
    if unmakeable:
        engines = _list_able(engines, unmakeable)
    engines = [engine for engine in engines if not engine.is_silent] or engines
    if len(engines) == 1:
        return next(iter(engines))
    prefixes = tuple(name_prefixes(request))

    def merit_of(engine: Engine) -> Merit:
        work_ahead = engine.num_tokens_in_flight - engine.count_prefix_tokens(prefixes)
        of_cache_key = rendezvous(cache_key, request.cache_salt, engine.rank) if cache_key else b""
        return Merit(engine.count_held_media_tokens(request), of_cache_key, -work_ahead)

    def break_tie(engine: Engine) -> bytes:
        beginning = request.media[0].media_hash if request.media else repr(request.token_ids[:SHORTEST_PREFIX])
        return rendezvous(beginning, request.cache_salt, engine.rank)

    work_in_flight = {engine: engine.num_tokens_in_flight for engine in engines}
    return choose_by_merit(work_in_flight, SLACK_TOKENS, merit_of, break_tie)


def _list_able(engines: Collection[Engine], unmakeable: Collection[str]) -> Collection[Engine]:
    """Return the engines that hold all these media; if none does, those that expect to; if none does either, all."""
    holding = [engine for engine in engines if all(map(engine.hints.is_held, unmakeable))]
    return holding or [engine for engine in engines if all(map(engine.holds, unmakeable))] or engines


def count_tokens(request: EngineRequest) -> int:
    """Return the number of tokens that the request is assumed to cost."""
    params = request.sampling_params
    answer = min(params.max_tokens or TYPICAL_ANSWER_TOKENS, TYPICAL_ANSWER_TOKENS)
    return len(request.token_ids) + params.n * answer


def name_prefixes(request: EngineRequest) -> Iterator[int]:
    """Yield names of the first 64 tokens, 128, 256 ...: equal if all they depend on is equal; hardly ever otherwise."""
    name, start, end = hash((request.cache_salt, request.adapter)), 0, SHORTEST_PREFIX
    while end <= len(request.token_ids):
        media = tuple(item.media_hash for item in request.media if start <= item.span.start < end)
        name = hash((name, request.token_ids[start:end], media))
        yield name
        start, end = end, 2 * end
