"""The engine on a thread of its own in the caller's process.

Hands its outputs to whoever asked, on an event loop or on the engine's own thread, and has the media made that it
lacks.  Each request is in `_callers` until the last is heard of it or its caller leaves; whoever takes it out tells
the others.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from keepsight.engine.engine_loop import EngineLoop, Runner
from keepsight.engine.inbox import Inbox
from keepsight.errors import RequestFailedError
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.prepare_request import PreparedRequest
from keepsight.requests import (
    AbortRequest,
    FromEngine,
    MediaArrived,
    MediaNeeded,
    Pixels,
    RequestFailed,
    ResetCaches,
    TokenOutput,
)
from keepsight.scheduling.scheduler import Scheduler

# What a caller hears: tokens as they come; an exception is the last.
Outputs = list[TokenOutput | Exception]
OnOutputs = Callable[[Outputs], None]


class _Caller:
    def __init__(
        self, prepared: PreparedRequest, on_outputs: OnOutputs, event_loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.prepared, self.on_outputs, self.event_loop = prepared, on_outputs, event_loop
        self.request_id = prepared.engine_request.request_id
        self.unfinished = set(range(prepared.engine_request.sampling_params.n))


class InProcessEngine:
    def __init__(self, scheduler: Scheduler, runner: Runner, inbox: Inbox, media_pool: MediaPool) -> None:
        """`inbox` is the one that the runner wakes."""
        self._inbox, self._media_pool = inbox, media_pool
        self._callers: dict[str, _Caller] = {}
        self._loop = EngineLoop(scheduler, runner, inbox, self._dispatch)
        self._thread = threading.Thread(target=self._loop.run, name="engine", daemon=True)
        self._thread.start()

    # For callers ----------------------------------------------------------------------------------------------

    async def generate(self, prepared: PreparedRequest) -> AsyncGenerator[TokenOutput, None]:
        arrived: asyncio.Queue[Outputs] = asyncio.Queue()
        caller = _Caller(prepared, arrived.put_nowait, asyncio.get_running_loop())
        self._admit(caller)
        try:
            while caller.unfinished or not arrived.empty():
                for output in await arrived.get():
                    if isinstance(output, Exception):
                        raise output
                    yield output
        finally:
            self.leave(caller.request_id)

    def submit(self, prepared: PreparedRequest, on_outputs: OnOutputs) -> None:
        """`on_outputs` is called on a thread of the engine's, and must not keep it."""
        self._admit(_Caller(prepared, on_outputs, None))

    def leave(self, request_id: str) -> bool:
        """Nothing more of this request is wanted.  False once it has ended: there was nothing to leave."""
        was_running = self._take_out(request_id)
        if was_running:
            self._inbox.try_put(AbortRequest(request_id))
        return was_running

    def stop_choice(self, request_id: str, choice: int) -> None:
        caller = self._callers.get(request_id)
        if caller is not None and choice in caller.unfinished:
            self._inbox.try_put(AbortRequest(request_id, choice))
            self._note_end(caller, choice)

    def reset_caches(self, *, prefix: bool = False, encoder: bool = False, processor: bool = False) -> None:
        """For requests that come after it."""
        if processor:
            self._media_pool.reset_cache()
        self._inbox.try_put(ResetCaches(prefix, encoder))

    def close(self) -> None:
        """What still runs fails.  May be called more than once, and from any thread."""
        self._inbox.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._media_pool.close()

    # Between caller and loop ----------------------------------------------------------------------------------

    def _admit(self, caller: _Caller) -> None:
        self._callers[caller.request_id] = caller
        if not self._inbox.try_put(caller.prepared.engine_request):
            del self._callers[caller.request_id]
            raise RequestFailedError(self._loop.reason_of_end or "the engine was closed")

    def _dispatch(self, outputs: Sequence[FromEngine]) -> None:
        heard: dict[str, Outputs] = defaultdict(list)
        for output in outputs:
            match output:
                case MediaNeeded():
                    self._make_media(output)
                case TokenOutput():
                    heard[output.request_id].append(output)
                case RequestFailed(request_id, message, is_refusal):
                    heard[request_id].append(RequestFailedError(message, is_refusal=is_refusal))
        callers = ((self._callers.get(request_id), its) for request_id, its in heard.items())
        self._deliver([(caller, its) for caller, its in callers if caller is not None])

    def _deliver(self, deliveries: Sequence[tuple[_Caller, Outputs]]) -> None:
        """All that is for one event loop crosses over to it in one go: waking it costs more than a token."""
        by_event_loop = defaultdict(list)
        for delivery in deliveries:
            by_event_loop[delivery[0].event_loop].append(delivery)
        for event_loop, its in by_event_loop.items():
            if event_loop is None:
                self._hand_out(its)
            else:
                self._cross_to(event_loop, its)

    def _cross_to(self, event_loop: asyncio.AbstractEventLoop, deliveries: Sequence[tuple[_Caller, Outputs]]) -> None:
        try:
            event_loop.call_soon_threadsafe(self._hand_out, deliveries)
        except RuntimeError:  # it was closed, and none of its callers left before
            for caller, _ in deliveries:
                self.leave(caller.request_id)

    def _hand_out(self, deliveries: Sequence[tuple[_Caller, Outputs]]) -> None:
        for caller, outputs in deliveries:
            for output in outputs:
                if isinstance(output, Exception):
                    self._note_end(caller, *caller.unfinished)
                elif output.finish_reason is not None:
                    self._note_end(caller, output.choice)
            caller.on_outputs(outputs)

    def _note_end(self, caller: _Caller, *choices: int) -> None:
        caller.unfinished.difference_update(choices)
        if not caller.unfinished:
            self._take_out(caller.request_id)

    def _take_out(self, request_id: str) -> bool:
        if self._callers.pop(request_id, None) is None:
            return False
        self._media_pool.forget(request_id)
        return True

    # Media ----------------------------------------------------------------------------------------------------

    def _make_media(self, needed: MediaNeeded) -> None:
        caller = self._callers.get(needed.request_id)
        if caller is None:
            return
        fail = partial(self._fail, caller)
        self._media_pool.make(caller.prepared, needed.media_hashes, self._take_pixels, fail)
        if needed.request_id not in self._callers:  # it left meanwhile, when there was nothing yet to forget
            self._media_pool.forget(needed.request_id)

    def _take_pixels(self, media_hash: str, pixels: Pixels) -> None:
        self._inbox.try_put(MediaArrived(media_hash, pixels))

    def _fail(self, caller: _Caller, error: Exception) -> None:
        """Its media cannot be made: the engine would wait for it for ever."""
        if self.leave(caller.request_id):
            self._deliver([(caller, [error])])
