"""Lets only so many at once do something expensive, and tenants by turns: one that asks for much delays itself.

Used on one event loop, so it needs no lock.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class FairTurns:
    def __init__(self, num_at_once: int) -> None:
        self._num_free = num_at_once
        # By tenant, the one whose turn is next first. No queue is empty.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncGenerator[None, None]:
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(tenant, turn)
            else:  # its turn had just come
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            turn = queue[0]
            self._remove(tenant, turn)
            if not turn.cancelled():
                if queue:
                    self._waiting[tenant] = self._waiting.pop(tenant)
                turn.set_result(None)
                return
        self._num_free += 1

    def _remove(self, tenant: str, turn: asyncio.Future[None]) -> None:
        """Remove a turn if it waits; its tenant keeps its place among the others."""
        queue = self._waiting.get(tenant, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[tenant]
