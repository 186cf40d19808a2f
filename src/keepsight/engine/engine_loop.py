"""The loop around the decisions: receive, schedule, run, update, send.

Knows neither who asks, nor where pixels are kept, nor how anything is computed.  However it ends, everybody who is owed
an answer gets one; and with nothing to compute it sleeps until a message or the runner wakes it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from keepsight.engine.embedding_tiers import EmbeddingTiers
from keepsight.engine.engine_meter import EngineMeter
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import PixelSource
from keepsight.engine.prefix_tiers import PrefixTiers
from keepsight.engine.unanswered import Unanswered
from keepsight.requests import (
    AbortRequest,
    EngineRequest,
    FromEngine,
    MediaArrived,
    MediaNeeded,
    Pixels,
    RequestFailed,
    ResetCaches,
    ToEngine,
)
from keepsight.scheduling.scheduler import Scheduler
from keepsight.scheduling.step_plan import StepPlan, StepResult
from keepsight.tiers.tier import StoredArray

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Wakes the inbox whenever something that it computes beside the steps has finished."""

    def hold_pixels(self, media_hash: str, pixels: Pixels) -> None: ...

    def hold_embeddings(self, encoder_key: str, array: StoredArray) -> None: ...

    def hold_stretch(self, stretch: bytes, array: StoredArray) -> None: ...

    def run(self, plan: StepPlan) -> StepResult: ...

    def prepare(self) -> bool:
        """Called when there is nothing to run: a moment's work for later; False where none is left."""
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
        self._unanswered = Unanswered()
        # Media whose pixels the source had, and that have not come back by the inbox yet.
        self._found: set[str] = set()
        self._is_idle = True
        # Somebody listens who was not told yet what is held.
        self._has_new_listener = False
        # Once it has ended: why no later request will be answered.
        self.reason_of_end: str | None = None

    def tell_all_held(self) -> None:
        """From any thread: soon, and to everybody, as to those who know it already it does no harm."""
        self._has_new_listener = True
        self._inbox.wake()

    def run(self) -> None:
        """Until the inbox is closed, or something fails that no request is to blame for."""
        reason = "the engine was closed"
        try:
            while not self._inbox.is_closed:
                self.step()
        except Exception as error:
            logger.exception("the engine failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
        self._end(reason)

    def step(self) -> None:
        self._receive()
        plan = self._schedule()
        began, result = time.monotonic(), self._runner.run(plan)
        self._send(self._update(plan, result, time.monotonic() - began))
        self._is_idle = self._has_come_to_rest(plan, result)

    def _receive(self) -> None:
        while self._is_idle and not self._inbox.has_news and self._runner.prepare():
            pass
        for message in self._inbox.take(waits=self._is_idle):
            self._unanswered.note_asked(message)
            self._act_on(message)
        # First: what is found of a prompt needs no embeddings.
        self._load_stretches()
        self._load_embeddings()

    def _act_on(self, message: ToEngine) -> None:
        match message:
            case EngineRequest():
                self._add(message)
            case AbortRequest(request_id, choice):
                self._scheduler.abort(request_id, choice)
            case MediaArrived():
                self._take_pixels(message)
            case ResetCaches(prefix, encoder, processor):
                self._reset(prefix=prefix, encoder=encoder, processor=processor)

    def _add(self, request: EngineRequest) -> None:
        if refusal := self._scheduler.add(request):
            self._send([refusal])
            return
        self._meter.note_arrived(request)
        if self._tiers is not None:
            self._tiers.note_uses(request)

    def _reset(self, *, prefix: bool, encoder: bool, processor: bool) -> None:
        self._scheduler.reset(prefix=prefix, encoder=encoder)
        if prefix and self._prefixes is not None:
            self._prefixes.clear()
        if encoder and self._tiers is not None:
            self._tiers.clear()
        if processor:
            self._source.clear()

    def _take_pixels(self, message: MediaArrived) -> None:
        # Also what nobody wants any more: where it lies can be reused, and it may be kept for others.
        pixels, were_kept = self._source.receive(message), message.media_hash in self._found
        self._found.discard(message.media_hash)
        if pixels is None:
            self._scheduler.media.pixels.lose(message.media_hash)
        elif self._scheduler.media_arrived(message.media_hash):
            self._runner.hold_pixels(message.media_hash, pixels)
            self._meter.note_pixels(message.media_hash, were_kept=were_kept)

    def _load_stretches(self) -> None:
        """Asks for what is wanted of prompts that have come, and gives blocks to what was found."""
        if self._prefixes is None:
            return
        for wanted in self._scheduler.stretches.take_wanted():
            self._meter.note_stretches(wanted)
            self._prefixes.load(wanted, self._meter.seconds_to_compute(wanted))
        for loaded in self._prefixes.take_loaded():
            for place, array in zip(loaded.places, loaded.arrays, strict=True):
                self._runner.hold_stretch(loaded.load.hashes[place], array)
            self._scheduler.stretches_loaded(loaded.load, loaded.places, is_last=loaded.is_last)

    def _load_embeddings(self) -> None:
        """Asks tiers for what is wanted.  What lies in host memory, or nowhere, is known before the step is planned."""
        if self._tiers is None:
            return
        self._ask_tiers(self._tiers)
        for loaded in self._tiers.take_loaded():
            key, array, tier = loaded
            self._meter.note_looked_in_tiers(key, tier)
            if self._scheduler.embeddings_loaded(key, is_found=array is not None) and array and tier:
                self._runner.hold_embeddings(key, array)
                self._meter.note_loaded(key, tier, array.seconds)

    def _ask_tiers(self, tiers: EmbeddingTiers) -> None:
        for load in self._scheduler.media.loads.take_wanted():
            self._meter.note_load(load)
            tiers.load(load)

    def _schedule(self) -> StepPlan:
        """What is missing is asked for before the step is computed: it is made meanwhile."""
        self._scheduler.pins.tell_time(time.monotonic())
        plan = self._scheduler.schedule()
        if self._tiers is not None:
            # Evicted since they were asked for, or never before; answered before the next step is planned.
            self._ask_tiers(self._tiers)
        missing = [self._find_pixels(needed) for needed in self._scheduler.media.pixels.take_needed()]
        self._send([needed for needed in missing if needed.media_hashes])
        return plan

    def _find_pixels(self, needed: MediaNeeded) -> MediaNeeded:
        """What of it must be asked for.  What is found arrives with the next step, as this one is planned already."""
        can_be_made = self._scheduler.media.pixels.can_be_made
        found = {each: self._source.find(each, may_hold_back=can_be_made(each)) for each in needed.media_hashes}
        for media_hash, pixels in found.items():
            if pixels is not None:
                self._found.add(media_hash)
                self._inbox.try_put(MediaArrived(media_hash, pixels))
                self._meter.note_found_pixels(media_hash)
        return replace(needed, media_hashes=tuple(each for each, pixels in found.items() if pixels is None))

    def _update(self, plan: StepPlan, result: StepResult, seconds: float) -> Sequence[FromEngine]:
        """What is to be told of it; what it took first."""
        outputs = self._scheduler.update(result)
        return [*self._meter.note_step(plan, result, seconds), *outputs, *self._take_hints()]

    def _has_come_to_rest(self, plan: StepPlan, result: StepResult) -> bool:
        """With nothing begun and nothing heard, the next plan would be as empty."""
        has_answers = any(tiers.has_answers for tiers in (self._tiers, self._prefixes) if tiers is not None)
        return plan.is_empty and result.is_empty and not has_answers

    def _take_hints(self) -> Sequence[FromEngine]:
        self._scheduler.kept.note_pixels(*self._source.take_changes())
        if self._tiers is not None:
            self._scheduler.kept.note_embeddings(*self._tiers.take_changes())
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
        # From here on nothing is taken in; what came before is answered below.
        self._inbox.close()
        for message in self._inbox.take(waits=False):
            self._unanswered.note_asked(message)
        self._send([RequestFailed(request_id, reason) for request_id in self._unanswered])
        self._runner.close()
        self._source.close()
        for tiers in (self._tiers, self._prefixes):
            if tiers is not None:
                tiers.close()
