"""The engine's main loop: receive, schedule, run, update, send.

Knows neither the clients, nor where pixels are kept, nor how anything is computed. However it ends, every request still
owed an answer gets one. With nothing to compute, it sleeps until a message or the runner wakes it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from keepsight.engine.embedding_tiers import EmbeddingTiers
from keepsight.engine.engine_meter import EngineMeter
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import PixelSource
from keepsight.engine.prefix_tiers import PrefixTiers
from keepsight.engine.unanswered import Unanswered
from keepsight.requests import (
    AbortRequest,
    CachesReset,
    EngineRequest,
    FindMedia,
    FromEngine,
    MediaArrived,
    MediaFound,
    MediaNeeded,
    Pixels,
    Received,
    RequestFailed,
    ResetCaches,
    UnreadableMedia,
)
from keepsight.scheduling.scheduler import Scheduler
from keepsight.scheduling.step_plan import StepPlan, StepResult
from keepsight.structured_outputs import StructuredOutputsParams
from keepsight.tiers.tier import StoredArray

logger = logging.getLogger(__name__)

# While a tier cannot be cleared. Whoever asked for an earlier one has given up long ago.
MAX_UNFINISHED_RESETS = 100


class Runner(Protocol):
    """Runs the planned steps. Wakes the inbox whenever work that it computes beside the steps has finished."""

    def hold_pixels(self, media_hash: str, pixels: Pixels) -> None: ...

    def hold_embeddings(self, encoder_key: str, array: StoredArray) -> None: ...

    def hold_stretch(self, stretch: bytes, array: StoredArray) -> None: ...

    def compile(self, form: StructuredOutputsParams) -> Future[Any]:
        """Begin to compile the grammar that a request's answer keeps to. What it gives stays with the runner."""
        ...

    def run(self, plan: StepPlan) -> StepResult: ...

    def prepare(self) -> bool:
        """Do a little work ahead of time, when there is nothing to run. Return False if none is left."""
        ...

    def close(self) -> None: ...


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox,
        send: Callable[[Sequence[FromEngine]], None],
        source: PixelSource,
        tiers: EmbeddingTiers | None,
        meter: EngineMeter,
        prefixes: PrefixTiers | None = None,
    ) -> None:
        self._scheduler, self._runner, self._inbox, self._send_on = scheduler, runner, inbox, send
        self._source, self._tiers, self._prefixes, self._meter = source, tiers, prefixes, meter
        self._all_tiers = [each for each in (tiers, prefixes) if each is not None]
        self._unanswered = Unanswered()
        # Media whose pixels the source had, and whose `MediaArrived` has not been read from the inbox yet.
        self._found: set[str] = set()
        # Requests whose grammars have been compiled meanwhile.
        self._compiled: deque[str] = deque()
        # The ids of resets that the tiers may not have finished.
        self._unfinished_resets: dict[str, list[PrefixTiers | EmbeddingTiers]] = {}
        self._is_idle, self._num_beats = True, 0
        # True while a new frontend has not been told which media are held.
        self._has_new_listener = False
        # Set once the loop has ended: why no later request will be answered.
        self.reason_of_end: str | None = None
        # Set if it failed while it owed answers.
        self.has_failed_at_work = False

    @property
    def beat(self) -> int | None:
        """A number that changes with each step; None while the loop waits for messages, or comes to its end."""
        return None if self._inbox.is_waited_at or self._inbox.is_closed else self._num_beats

    def report_all_held(self) -> None:
        """Soon tell all frontends which media are held; telling one twice does no harm. Callable from any thread."""
        self._has_new_listener = True
        self._inbox.wake()

    def run(self) -> None:
        """Run until the inbox is closed, or something fails that no single request is to blame for."""
        reason = "the engine was closed"
        try:
            while not self._inbox.is_closed:
                self.step()
        except Exception as error:
            logger.exception("the engine failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
            self.has_failed_at_work = len(self._unanswered) > 0
        self._end(reason)

    def step(self) -> None:
        self._receive()
        plan = self._schedule()
        began, result = time.monotonic(), self._runner.run(plan)
        self._send(self._update(plan, result, time.monotonic() - began))
        self._is_idle = self._has_come_to_rest(plan, result)

    def _receive(self) -> None:
        while self._is_idle and not self._inbox.has_news and self._runner.prepare():
            self._num_beats += 1
        for message in self._inbox.take(waits=self._is_idle):
            self._unanswered.note_asked(message)
            self._act_on(message)
        while self._compiled:
            self._scheduler.grammar_compiled(self._compiled.popleft())
        self._num_beats += 1
        self._send(self._end_resets())
        # Stretches first: media in prefixes found there need no embeddings.
        self._load_stretches()
        self._load_embeddings()

    def _act_on(self, message: Received) -> None:
        match message:
            case EngineRequest():
                self._add(message)
            case AbortRequest(request_id, choice):
                self._scheduler.abort(request_id, choice)
            case MediaArrived():
                self._take_pixels(message)
            case UnreadableMedia():
                self._fail_waiting(message)
            case ResetCaches():
                self._reset(message)
            case FindMedia():
                self._send([self._find_media(message)])

    def _add(self, request: EngineRequest) -> None:
        form = request.sampling_params.structured_outputs
        grammar, request_id = None if form is None else self._runner.compile(form), request.request_id
        if refusal := self._scheduler.add(request, grammar):
            self._send([refusal])
            return
        if grammar is not None:
            # By its id alone: a compiled grammar is kept, and its callbacks with it.
            grammar.add_done_callback(lambda _: self._note_compiled(request_id))
        self._source.touch(item.media_hash for item in request.media)
        self._meter.note_arrived(request)
        if self._tiers is not None:
            self._tiers.note_uses(request)

    def _note_compiled(self, request_id: str) -> None:
        """Note that the request's grammar is compiled, or cannot be. Called from the thread that compiles."""
        self._compiled.append(request_id)
        self._inbox.wake()

    def _reset(self, reset: ResetCaches) -> None:
        self._scheduler.reset(prefix=reset.prefix, encoder=reset.encoder)
        cleared: list[PrefixTiers | EmbeddingTiers] = []
        if reset.prefix and self._prefixes is not None:
            cleared.append(self._prefixes)
        if reset.encoder and self._tiers is not None:
            cleared.append(self._tiers)
        for tiers in cleared:
            tiers.clear()
        if reset.processor:
            self._source.clear()
        self._unfinished_resets[reset.query_id] = cleared
        if len(self._unfinished_resets) > MAX_UNFINISHED_RESETS:
            del self._unfinished_resets[next(iter(self._unfinished_resets))]

    def _end_resets(self) -> Sequence[FromEngine]:
        """Return the answers to resets whose tiers are empty: what they held would outlive this engine."""
        if not self._unfinished_resets:
            return ()
        waits = [tiers for tiers in self._all_tiers if not tiers.is_cleared]
        unfinished = self._unfinished_resets.items()
        ended = [query_id for query_id, cleared in unfinished if not any(tiers in waits for tiers in cleared)]
        for query_id in ended:
            del self._unfinished_resets[query_id]
        return [CachesReset(query_id) for query_id in ended]

    def _find_media(self, query: FindMedia) -> MediaFound:
        encoder_cache, prefixes = self._scheduler.media.encoder_cache, self._scheduler.held_prefixes
        on_device = ("device",) if all(map(encoder_cache.is_held, query.media_hashes)) else ()
        # Without an adapter, embeddings are named by the media hash alone.
        below = () if self._tiers is None else self._tiers.list_holders(query.media_hashes)
        is_in_prefixes = all(each in prefixes for each in query.media_hashes)
        return MediaFound(query.query_id, (*on_device, *below), is_in_prefixes)

    def _take_pixels(self, message: MediaArrived) -> None:
        # Receive pixels even if they are no longer wanted: this frees their place, and they may be kept for others.
        pixels, was_cached = self._source.receive(message), message.media_hash in self._found
        self._found.discard(message.media_hash)
        if pixels is None:
            self._scheduler.media.pixels.lose(message.media_hash)
        elif self._scheduler.media_arrived(message.media_hash):
            self._runner.hold_pixels(message.media_hash, pixels)
            self._meter.note_pixels(message.media_hash, was_cached=was_cached)

    def _fail_waiting(self, message: UnreadableMedia) -> None:
        """Fail the requests that wait for unreadable pixels: they would be sent the same way again."""
        waiting = self._scheduler.media.pixels.give_up(message.media_hash)
        for request_id in waiting:
            self._scheduler.abort(request_id)
        self._send([RequestFailed(request_id, message.reason) for request_id in waiting])

    def _load_stretches(self) -> None:
        """Request the stretches that newly arrived prompts want, and give blocks to those that were found."""
        if self._prefixes is None:
            return
        self._ask_prefixes(self._prefixes)
        for loaded in self._prefixes.take_loaded():
            for place, array in zip(loaded.places, loaded.arrays, strict=True):
                self._runner.hold_stretch(loaded.load.hashes[place], array)
            self._scheduler.stretches_loaded(loaded.load, loaded.places, is_last=loaded.is_last)

    def _ask_prefixes(self, prefixes: PrefixTiers) -> None:
        for load in self._scheduler.stretches.take_wanted():
            self._meter.note_stretches(load)
            prefixes.load(load, self._meter.seconds_to_compute(load))

    def _load_embeddings(self) -> None:
        """Request wanted embeddings from the tiers. If in host memory, or in no tier, that is known before the plan."""
        if self._tiers is None:
            return
        self._ask_tiers(self._tiers)
        for key, array, tier in self._tiers.take_loaded():
            if self._scheduler.embeddings_loaded(key, is_found=array is not None) and array and tier:
                self._runner.hold_embeddings(key, array)
                self._meter.note_loaded(key, tier, array.seconds)

    def _ask_tiers(self, tiers: EmbeddingTiers) -> None:
        for load in self._scheduler.media.loads.take_wanted():
            self._meter.note_load(load)
            tiers.load(load)

    def _schedule(self) -> StepPlan:
        """Plan a step. Missing pixels are requested before the step runs, so that they are made meanwhile."""
        self._scheduler.pins.note_time(time.monotonic())
        plan = self._scheduler.schedule()
        # Whatever is requested here is answered before the next plan.
        if self._prefixes is not None:
            # Stretches that lacked room while others' were kept for sequences that this plan started or parked.
            self._ask_prefixes(self._prefixes)
        if self._tiers is not None:
            # Embeddings evicted since they were requested, or not requested yet.
            self._ask_tiers(self._tiers)
        missing = [self._find_pixels(needed) for needed in self._scheduler.media.take_needed()]
        self._send([needed for needed in missing if needed.media_hashes])
        return plan

    def _find_pixels(self, needed: MediaNeeded) -> MediaNeeded:
        """Return what must still be requested. Pixels found here join the next step, as this one is already planned."""
        can_be_made = self._scheduler.media.pixels.can_be_made
        found = {each: self._source.find(each, may_hold_back=can_be_made(each)) for each in needed.media_hashes}
        for media_hash, pixels in found.items():
            if pixels is not None:
                self._found.add(media_hash)
                self._inbox.try_put(MediaArrived(media_hash, pixels))
                self._meter.note_found_pixels(media_hash)
        return replace(needed, media_hashes=tuple(each for each, pixels in found.items() if pixels is None))

    def _update(self, plan: StepPlan, result: StepResult, seconds: float) -> Sequence[FromEngine]:
        """Return the outputs to send, each `RequestBegun` before the request's tokens."""
        outputs = self._scheduler.update(result)
        return [*self._meter.note_step(plan, result, seconds), *outputs, *self._take_hints()]

    def _has_come_to_rest(self, plan: StepPlan, result: StepResult) -> bool:
        """Return True if nothing was started and nothing came back: the next plan would be empty, too."""
        return plan.is_empty and result.is_empty and not any(tiers.has_work for tiers in self._all_tiers)

    def _take_hints(self) -> Sequence[FromEngine]:
        self._scheduler.reported.note_pixels(*self._source.take_changes())
        if self._tiers is not None:
            self._scheduler.reported.note_embeddings(*self._tiers.take_changes())
        self._source.note_embeddings(*self._scheduler.held_embeddings.take_names())
        hints = self._scheduler.holdings.take_changes()
        if self._has_new_listener:
            self._has_new_listener = False
            hints += self._scheduler.holdings.list_held()
        return hints

    def _send(self, outputs: Sequence[FromEngine]) -> None:
        for output in outputs:
            self._unanswered.note_answered(output)
        if outputs:
            self._send_on(outputs)

    def _end(self, reason: str) -> None:
        self.reason_of_end = reason
        # No messages are accepted from here on; those that came before are answered below.
        self._inbox.close()
        for message in self._inbox.take(waits=False):
            self._unanswered.note_asked(message)
        self._send([RequestFailed(request_id, reason) for request_id in self._unanswered])
        self._runner.close()
        self._source.close()
        for tiers in self._all_tiers:
            tiers.close()
