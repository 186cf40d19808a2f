"""Connections to origin servers, some of which are kept open for reuse.

A request that is canceled at the wrong moment leaves its connection marked as in use in httpcore's pool, forever.
Hence the invariant: a pool in which a request was canceled takes no new ones and is closed after its last user leaves.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import httpcore

from keepsight.frontend.intake.network_guard import GuardedBackend, NetworkGuard

# High, because slow connections cost little besides their slots.
MAX_CONNECTIONS = 256
MAX_IDLE_CONNECTIONS = 16
IDLE_SECONDS = 15.0


class Connections:
    """Pools of guarded connections.  Belongs to the event loop in which it is first used."""

    def __init__(self, guard: NetworkGuard, ssl_context: ssl.SSLContext) -> None:
        self._guard, self._ssl_context = guard, ssl_context
        # Connection slots of all pools together.
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        # The pool for new requests, and the number of requests that use each pool.
        self._pool = self._open_pool()
        self._num_users = Counter[httpcore.AsyncConnectionPool]()
        self._closing = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def ask(
        self, url: httpcore.URL, headers: Sequence[tuple[bytes, bytes]]
    ) -> AsyncGenerator[httpcore.Response, None]:
        async with self._places:
            pool = self._pool
            self._num_users[pool] += 1
            try:
                async with pool.stream("GET", url, headers=headers) as answer:
                    yield answer
            except asyncio.CancelledError:
                if pool is self._pool:
                    self._pool = self._open_pool()
                raise
            finally:
                self._num_users[pool] -= 1
                if pool is not self._pool and not self._num_users[pool]:
                    self._begin_to_close(pool)

    async def close(self) -> None:
        for pool in {self._pool, *self._num_users}:
            await pool.aclose()
        await asyncio.gather(*self._closing)

    def check_invariants(self) -> None:
        """Call this only while no request is inside `ask`."""
        assert not +self._num_users
        assert all(each.is_idle() or each.is_closed() for each in self._pool.connections)

    def _begin_to_close(self, pool: httpcore.AsyncConnectionPool) -> None:
        """Close the pool in a new task, as the current one may be canceled again."""
        del self._num_users[pool]
        closing = asyncio.create_task(pool.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _open_pool(self) -> httpcore.AsyncConnectionPool:
        return httpcore.AsyncConnectionPool(
            self._ssl_context,
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_IDLE_CONNECTIONS,
            keepalive_expiry=IDLE_SECONDS,
            network_backend=GuardedBackend(self._guard),
        )
