"""Counts a frontend's requests as they run, and exports the account of each request that has ended.

When tokens come is recorded without a lock, on the one thread that delivers them; how many there are, and the ends, one
for each request, are counted under a lock. A request that is generated again because its answer was lost with an
engine still counts as one.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from keepsight.observe.account import RequestAccount
from keepsight.observe.account_ring import AccountRing
from keepsight.observe.catalogue import FINISHED_REASONS, STAGE, slot_of
from keepsight.observe.counters import Counters

FIRST_TOKEN, NEXT_TOKEN = slot_of("time_to_first_token_seconds"), slot_of("inter_token_latency_seconds")
WHOLE = slot_of("e2e_request_latency_seconds")
PROMPT_TOKENS, ANSWER_TOKENS = slot_of("prompt_tokens_total"), slot_of("generation_tokens_total")
WAITING = slot_of("num_requests_waiting")
ENDS = {reason: slot_of("request_success_total", reason) for reason in FINISHED_REASONS}


class RequestObserver:
    def __init__(
        self,
        counters: Counters | None = None,
        ring: AccountRing | None = None,
        export: Callable[[RequestAccount], object] | None = None,
    ) -> None:
        self.counters, self._ring, self._export = counters or Counters(), ring, export
        self._lock = threading.Lock()

    def note_without_engine(self, count: int) -> None:
        """Set how many requests wait for an engine; those that one has are counted by it."""
        self.counters.set(WAITING, count)

    def note_tokens(
        self, account: RequestAccount, count: int, num_cached: int, now: float, choices: Sequence[int] = (0,)
    ) -> None:
        """Record tokens that come together, of these choices.

        `count` may be 0: the reader of the answer finds out how many are part of it (`count_tokens`).
        """
        is_first = not account.last_token_at
        gap = account.note_tokens(num_cached, now, choices)
        self.count_tokens(account, count)
        if gap is not None:
            self.counters.observe(NEXT_TOKEN, gap)
        elif is_first and not account.had_tokens:
            self.counters.add(PROMPT_TOKENS, account.num_prompt_tokens)
            if account.wants_answer:
                self.counters.observe(FIRST_TOKEN, now - account.began)

    def count_tokens(self, account: RequestAccount, count: int) -> None:
        """Count tokens of an answer, on any thread."""
        with self._lock:
            account.num_tokens += count
            if account.wants_answer:
                self.counters.add(ANSWER_TOKENS, count)

    def note_end(self, account: RequestAccount, reason: str) -> None:
        """`reason` is the finish reason sent to the client, "abort" if it left, "error" if it was sent an error."""
        with self._lock:
            account.note_end(reason)
            is_over = self._count_end(account)
        if is_over:
            self._report(account)

    @contextmanager
    def holding_ends(self, accounts: Sequence[RequestAccount]) -> Iterator[None]:
        """Within this context, requests may be generated again; on exit, only the last end of each is reported."""
        for account in accounts:
            account.is_held = True
        try:
            yield
        finally:
            for account in accounts:
                with self._lock:
                    account.is_held = False
                    is_over = self._count_end(account)
                if is_over:
                    self._report(account)

    def _count_end(self, account: RequestAccount) -> bool:
        """Count the end if there is one and it is not held; return whether it was. Called with the lock held."""
        if account.end_reason is None or account.is_held:
            return False
        self.counters.add(ENDS[account.end_reason])
        self.counters.observe(WHOLE, account.ended - account.began)
        for span in account.spans:
            self.counters.observe(STAGE[span.stage], span.own_seconds)
        return True

    def _report(self, account: RequestAccount) -> None:
        """Report an end that was counted: without the lock, as describing hundreds of items takes milliseconds."""
        if self._ring is not None:
            self._ring.put(account.describe())
        if self._export is not None:
            self._export(account)
