"""The frontend's client of its engines, wherever they run: the callers that wait for them, and the media they lack.

Delivers outputs to their callers, on an event loop or on the thread that receives them. What it believes an engine to
hold is a hint: a wrong one costs a round trip. Each request is in `_callers` until its last output or until its caller
leaves; whichever side removes it notifies the others. One with stop strings is then in `_unread` until its reader has
read to the end, which only the reader finds. A request is with one engine at a time, and with none only while there is
none.
"""

import asyncio
import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from keepsight.errors import EngineLostError, InvalidArgumentError, RequestFailedError, ServerOverloadedError, WireError
from keepsight.frontend.caller import Caller, ConnectedEngine, OnOutputs, Outputs, Send
from keepsight.frontend.choose_engine import choose_engine
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.media_query import MediaPlaces, MediaQuery
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.reset_query import ResetQuery
from keepsight.frontend.unread_outputs import UnreadOutputs
from keepsight.observe.account import RequestAccount
from keepsight.observe.request_observer import RequestObserver
from keepsight.requests import (
    AbortRequest,
    CachesReset,
    CarriedPixels,
    FinishReason,
    FromEngine,
    MediaArrived,
    MediaDropped,
    MediaFound,
    MediaHeld,
    MediaNeeded,
    RequestBegun,
    RequestFailed,
    TiersChanged,
    TierStatus,
    TokenOutput,
)

# Engines that end within this time of each other are assumed to have one cause, such as lack of memory. A request that
# loses another engine later than that may itself be the cause: it is not given to a further one.
SAME_CAUSE_SECONDS = 1.0


class EngineClient:
    def __init__(
        self,
        media_pool: MediaPool,
        observer: RequestObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._media_pool, self._observer, self._clock = media_pool, observer or RequestObserver(), clock
        # Guards the set of engines and which request is with which; never held while callbacks run.
        self._lock = threading.RLock()
        self._callers: dict[str, Caller] = {}
        # With stop strings: the requests that the engine has ended and whose readers have not.
        self._unread: dict[str, Caller] = {}
        # By their ids, while someone waits for the answers.
        self._queries: dict[str, MediaQuery | ResetQuery] = {}
        # By rank.
        self._engines: dict[int, ConnectedEngine] = {}
        # Ranks of engines that are known to live, connected or not.
        self._living_ranks: set[int] = set()
        self._reason_of_end: str | None = None

    # The engines ----------------------------------------------------------------------------------------------

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    @property
    def num_silent_engines(self) -> int:
        return sum(engine.is_silent for engine in tuple(self._engines.values()))

    def list_tiers(self) -> dict[int, tuple[TierStatus, ...]]:
        """Return the last reported tiers of each engine that has any, by rank."""
        return {rank: engine.tiers for rank, engine in sorted(self._engines.items()) if engine.tiers}

    def expect(self, rank: int, *, lives: bool) -> None:
        """Note whether an engine of this rank lives: if it does, it is about to be connected, or connected again."""
        change = self._living_ranks.add if lives else self._living_ranks.discard
        with self._lock:
            change(rank)

    def note_silence(self, rank: int, *, is_silent: bool) -> None:
        """Note whether an engine has given no sign of life for long. It keeps its requests: it may speak again."""
        if engine := self._engines.get(rank):  # one that is not connected now will be only when it speaks
            engine.is_silent = is_silent

    def connect(self, send: Send, rank: int = 0, *, accepts_unrequested_pixels: bool = True) -> None:
        """Add an engine that is ready, and give it the waiting requests.

        `send` is called from many threads and must not wait. If it returns False, `disconnect` is about to be called
        for this engine, or was.
        """
        with self._lock:
            assert rank not in self._engines, rank
            self._engines[rank] = ConnectedEngine(send, rank, accepts_unrequested_pixels=accepts_unrequested_pixels)
            self._observer.note_without_engine(0)
            making = [(each, self._send_request(each)) for each in self._callers.values() if each.engine is None]
        for caller, coming in making:
            self._make_media(caller, coming)

    def disconnect(self, reason: str, rank: int = 0) -> None:
        """Remove an engine that is gone and sends nothing more. Requests without output so far go to another engine."""
        now = self._clock()
        with self._lock:
            engine = self._engines.pop(rank, None)
            for query in self._queries.values():
                query.lose(rank)
            theirs = [caller for caller in self._callers.values() if caller.engine is engine is not None]
            for caller in theirs:
                caller.engine = None
                caller.first_loss = min(caller.first_loss, now)
                self._media_pool.forget(caller.request_id)
            lost = [caller for caller in theirs if caller.has_begun or now - caller.first_loss > SAME_CAUSE_SECONDS]
            for caller in lost:
                self._remove(caller.request_id, "error")
            others = [caller for caller in theirs if caller.request_id in self._callers]
            making = [(caller, self._send_request(caller)) for caller in others]
        for caller in lost:
            self._tell_of_end(caller, "error")
        self._deliver([(caller, [EngineLostError(reason, had_begun=caller.has_begun)]) for caller in lost])
        for caller, coming in making:
            self._make_media(caller, coming)

    def give_up(self, reason: str) -> None:
        """Fail all requests: no engine will come any more."""
        with self._lock:
            self._reason_of_end = self._reason_of_end or reason
            self._engines.clear()
            for query in self._queries.values():
                query.give_up()
            callers = list(self._callers.values())
        lost = [caller for caller in callers if self._take_out(caller.request_id, "error") is not None]
        # One error object for each caller: a shared one would collect the traceback frames of all that raise it.
        self._deliver([(caller, [EngineLostError(self._reason_of_end)]) for caller in lost])

    def receive(self, outputs: Sequence[FromEngine], rank: int = 0) -> None:
        by_request: dict[str, Outputs] = defaultdict(list)
        for output in outputs:
            match output:
                case TokenOutput():
                    by_request[output.request_id].append(output)
                case RequestBegun(request_id):
                    if caller := self._callers.get(request_id):
                        reports = caller.account.note_begun(output)
                        media = caller.prepared.engine_request.media
                        self._media_pool.note_spared(media[index] for index, item in reports.items() if item.was_cached)
                case RequestFailed(request_id):
                    by_request[request_id].append(_to_error(output))
                case MediaNeeded(request_id, media_hashes, inline):
                    if caller := self._callers.get(request_id):
                        self._make_media(caller, media_hashes, inline=inline)
                case MediaFound(query_id) | CachesReset(query_id):
                    if query := self._queries.get(query_id):
                        query.take(output, rank)
                    elif isinstance(output, CachesReset):  # any frontend's
                        self._media_pool.free_cleared()
                case MediaHeld() | MediaDropped() | TiersChanged():
                    if engine := self._engines.get(rank):
                        engine.take_hint(output)
        self._deliver([(caller, own) for name, own in by_request.items() if (caller := self._callers.get(name))])

    # For callers ----------------------------------------------------------------------------------------------

    async def generate(self, prepared: PreparedRequest) -> AsyncGenerator[TokenOutput, None]:
        """Yield the request's tokens. Closing the generator aborts the request.

        Raises the error that making its pixels raised (before the first token), and RequestFailedError.
        """
        leave = partial(self.leave, prepared.engine_request.request_id)
        unread = UnreadOutputs(leave, self._clock)
        caller = Caller(prepared, unread.put, asyncio.get_running_loop())
        self._admit(caller)
        try:
            while caller.unfinished or unread:
                for output in await unread.take():
                    if isinstance(output, Exception):
                        raise output
                    yield output
                    unread.note_read()
        finally:
            leave()

    def holding_ends(self, accounts: Sequence[RequestAccount]) -> AbstractContextManager[None]:
        """For a caller that may generate lost answers again: each account is one request, however often it is begun."""
        return self._observer.holding_ends(accounts)

    def submit(self, prepared: PreparedRequest, on_outputs: OnOutputs) -> None:
        """Start a request. `on_outputs` is called on the thread that receives the outputs, and must not block it."""
        self._admit(Caller(prepared, on_outputs, None))

    def leave(self, request_id: str) -> bool:
        """Abort a request. Return False if it had already ended."""
        had_to_be_aborted = self._leave(request_id, "abort")
        self._end_reading(request_id)
        return had_to_be_aborted

    def note_read(self, request_id: str, choice: int, finish_reason: FinishReason | None) -> None:
        """Called for each token that is part of an answer, in order: those behind a stop string are not.

        `finish_reason`: how the choice ends with this token, if it does; if the engine has not ended it, it is stopped.
        Call it before the client gets the token, so that a delivered answer has been counted.
        """
        caller = self._callers.get(request_id) or self._unread.get(request_id)
        if caller is None:
            return
        if caller.has_stop_strings:
            self._observer.count_tokens(caller.account, 1)
        if finish_reason is not None:
            if choice in caller.unfinished:
                caller.send(AbortRequest(request_id, choice))
            self._note_end(caller, choice, finish_reason)
            caller.unread.discard(choice)
            if not caller.unread:
                self._end_reading(request_id, finish_reason)

    def reset_caches(self, *, prefix: bool = False, encoder: bool = False, processor: bool = False) -> None:
        """Reset caches for all later requests, and wait until the engines have done it.

        Raises an error if something from before may still be found afterwards.
        """
        if processor:
            try:
                self._media_pool.reset_cache()
            except OSError as error:
                raise ServerOverloadedError(f"the processor cache could not be cleared, try again: {error}") from error
        with self._lock:
            if self._reason_of_end is not None:
                raise EngineLostError(self._reason_of_end)
            if not self._engines:
                # The next engine begins with empty caches, except for those that outlive an engine.
                raise EngineLostError("no engine is ready: reset again once one is")
            ranks = self._living_ranks | self._engines.keys()
            if prefix:
                for engine in self._engines.values():
                    engine.forget_prefixes()
        reset = ResetQuery(ranks, prefix=prefix, encoder=encoder, processor=processor)
        with self._asking(reset):
            reset.wait()

    async def find_media(self, media_hashes: Iterable[str]) -> MediaPlaces:
        """Ask all connected engines where each holds all of these; one that does not answer soon is left out."""
        query = MediaQuery(media_hashes)
        with self._asking(query):
            return await query.wait()

    def engine_holds(self, media_hash: str) -> bool:
        """Return whether any engine is believed to hold something made from this media item."""
        return any(engine.hints.is_held(media_hash) for engine in tuple(self._engines.values()))

    def is_held(self, media_hash: str) -> bool:
        """Return whether an engine or this frontend holds something made from this media item."""
        return self.engine_holds(media_hash) or self._media_pool.is_held(media_hash)

    def close(self) -> None:
        """Fail all running requests. May be called more than once, and from any thread."""
        self.give_up("the engine was closed")
        self._media_pool.close()

    def check_invariants(self) -> None:
        with self._lock:
            assert not self._unread.keys() & self._callers.keys()
            for engine in self._engines.values():
                engine.check_invariants()
                theirs = {caller.request_id for caller in self._callers.values() if caller.engine is engine}
                assert engine.request_ids == theirs
            for caller in self._callers.values():
                is_lost = caller.engine not in self._engines.values()
                assert not is_lost or (caller.engine is None and not self._engines)

    @contextmanager
    def _asking(self, query: MediaQuery | ResetQuery) -> Iterator[None]:
        """Ask all connected engines, and pass on their answers until the context exits."""
        try:
            with self._lock:
                self._queries[query.query_id] = query
                query.ask(self._engines.values())
            yield
        finally:
            with self._lock:
                del self._queries[query.query_id]

    # Between callers and engines ------------------------------------------------------------------------------

    def _admit(self, caller: Caller) -> None:
        try:
            with self._lock:
                if self._reason_of_end is not None:
                    raise EngineLostError(self._reason_of_end)
                if caller.account.end_reason is not None:
                    caller.account.begin_again()
                caller.account.note_submitted()
                self._callers[caller.request_id] = caller
                coming = self._send_request(caller)
        except Exception:
            self._take_out(caller.request_id, "error")
            self._end_reading(caller.request_id)
            raise
        self._make_media(caller, coming)

    def _send_request(self, caller: Caller) -> Sequence[str]:
        """Give the request to an engine. Return the media that the engine was told are coming.

        Without an engine the request waits: the next engine is given all that wait.
        """
        if not self._engines:
            self._observer.note_without_engine(len(self._callers))
            return ()
        request = caller.prepared.engine_request
        unmakeable = tuple(each for each in request.unsent_media if not self._media_pool.is_held(each))
        engine = choose_engine(request, self._engines.values(), caller.prepared.cache_key, unmakeable)
        caller.engine = engine
        engine.note_sent(request)
        coming = engine.promise_pictures(caller.prepared)
        engine.send(dataclasses.replace(request, coming_media=coming) if coming else request)
        return coming

    def _deliver(self, deliveries: Sequence[tuple[Caller, Outputs]]) -> None:
        """Deliver outputs, waking each event loop only once: waking it costs more than a token."""
        by_event_loop = defaultdict(list)
        for caller, outputs in deliveries:
            caller.has_begun = True
            by_event_loop[caller.event_loop].append((caller, outputs))
        for event_loop, event_loop_deliveries in by_event_loop.items():
            if event_loop is None:
                self._hand_out(event_loop_deliveries)
            else:
                self._cross_to(event_loop, event_loop_deliveries)

    def _cross_to(self, event_loop: asyncio.AbstractEventLoop, deliveries: Sequence[tuple[Caller, Outputs]]) -> None:
        try:
            event_loop.call_soon_threadsafe(self._hand_out, deliveries)
        except RuntimeError:  # the event loop was closed before its callers left
            for caller, _ in deliveries:
                self.leave(caller.request_id)

    def _hand_out(self, deliveries: Sequence[tuple[Caller, Outputs]]) -> None:
        now = time.monotonic()
        for caller, delivered in deliveries:
            # An engine goes on with a choice until it reads that the choice was stopped.
            outputs = [each for each in delivered if isinstance(each, Exception) or each.choice in caller.unfinished]
            if not outputs:
                continue
            self._observe(caller, outputs, now)
            for output in outputs:
                if isinstance(output, Exception):
                    self._take_out(caller.request_id, "error")
                elif output.finish_reason is not None:
                    self._note_end(caller, output.choice, output.finish_reason)
            caller.on_outputs(outputs)

    def _observe(self, caller: Caller, outputs: Outputs, now: float) -> None:
        """Count the tokens before the caller gets them, so that a delivered answer has been counted."""
        if tokens := [each for each in outputs if isinstance(each, TokenOutput)]:
            num_tokens = 0 if caller.has_stop_strings else len(tokens)
            num_cached = min(each.num_cached_tokens for each in tokens)
            self._observer.note_tokens(caller.account, num_tokens, num_cached, now, [each.choice for each in tokens])

    def _note_end(self, caller: Caller, choice: int, reason: str) -> None:
        """Mark a choice as ended. The request ends as the last of its choices."""
        with self._lock:
            caller.unfinished.discard(choice)
            is_over = not caller.unfinished and self._remove(caller.request_id, reason) is not None
        if is_over:
            self._tell_of_end(caller, reason)

    def _end_reading(self, request_id: str, reason: str | None = None) -> None:
        """Report the end of a request with stop strings; without `reason`, the end that it had for the engine."""
        if (caller := self._unread.pop(request_id, None)) is not None:
            self._observer.note_end(caller.account, reason or caller.end_reason)

    def _leave(self, request_id: str, reason: str) -> bool:
        if (caller := self._take_out(request_id, reason)) is None:
            return False
        caller.send(AbortRequest(request_id))
        return True

    def _take_out(self, request_id: str, reason: str) -> Caller | None:
        """Remove a request; return None if it is gone already. `reason`: how it ends."""
        with self._lock:
            caller = self._remove(request_id, reason)
        if caller is not None:
            self._tell_of_end(caller, reason)
        return caller

    def _remove(self, request_id: str, reason: str) -> Caller | None:
        """Called with the lock held."""
        caller = self._callers.get(request_id)
        if caller is None:
            return None
        if caller.has_stop_strings:  # first: a reader looks for it in `_callers`, then here, without the lock
            caller.end_reason, self._unread[request_id] = reason, caller
        del self._callers[request_id]
        if not self._engines:
            self._observer.note_without_engine(len(self._callers))
        if caller.engine is not None:
            caller.engine.note_ended(request_id)
        return caller

    def _tell_of_end(self, caller: Caller, reason: str) -> None:
        self._media_pool.forget(caller.request_id)
        if not caller.has_stop_strings:
            self._observer.note_end(caller.account, reason)

    # Media ----------------------------------------------------------------------------------------------------

    def _make_media(self, caller: Caller, media_hashes: Sequence[str], *, inline: bool = False) -> None:
        if not media_hashes:
            return
        fail = partial(self._fail_media, caller)
        deliver = partial(self._take_pixels, caller)
        try:
            self._media_pool.make(caller.prepared, media_hashes, deliver, fail, inline=inline)
        except Exception as error:  # no thread can be started, or the cache cannot be read
            fail(error)
        if caller.request_id not in self._callers:  # it left meanwhile, before there was anything to forget
            self._media_pool.forget(caller.request_id)

    def _take_pixels(self, caller: Caller, media_hash: str, pixels: CarriedPixels) -> None:
        """Send the pixels to the engine that has the request by now."""
        caller.account.note_sent(media_hash)
        try:
            caller.send(MediaArrived(media_hash, pixels))
        except WireError as error:  # they are too large for any message
            self._fail_media(caller, RequestFailedError(f"media cannot be sent: {error}", is_refusal=True))
        except Exception as error:
            self._fail_media(caller, error)

    def _fail_media(self, caller: Caller, error: Exception) -> None:
        """Fail a request whose media cannot be made: the engine would wait for them forever."""
        caller.prepared.forget_names()
        if self._leave(caller.request_id, "error"):
            self._deliver([(caller, [error])])


def _to_error(failed: RequestFailed) -> Exception:
    if failed.field is not None:
        return InvalidArgumentError(failed.field, failed.message)
    return RequestFailedError(failed.message, is_refusal=failed.is_refusal)
