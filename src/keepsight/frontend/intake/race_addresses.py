"""Connects to whichever of a host's addresses answers first ("happy eyeballs", RFC 8305): dead ones cost little."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable

import httpcore

Stream = httpcore.AsyncNetworkStream
Connect = Callable[[str], Coroutine[None, None, Stream]]
# How long an address may take before the next one is tried as well.
HEAD_START_SECONDS = 0.25
# Losers of races that are being closed. The event loop itself keeps no task alive.
_closing = set[asyncio.Task[None]]()


async def race_addresses(addresses: Iterable[str], connect: Connect) -> Stream:
    """Return the first connection made; if there is none, raise what the last address failed with.

    Cancelable at any moment, also twice: what is left behind closes itself.
    """
    untried, attempts = list(addresses), list[asyncio.Task[Stream]]()
    winner: asyncio.Task[Stream] | None = None
    try:
        while untried or not all(attempt.done() for attempt in attempts):
            if untried:
                attempts.append(asyncio.create_task(connect(untried.pop(0))))
            under_way = [attempt for attempt in attempts if not attempt.done()]
            head_start = HEAD_START_SECONDS if untried else None
            await asyncio.wait(under_way, timeout=head_start, return_when=asyncio.FIRST_COMPLETED)
            winner = next(filter(_has_connected, attempts), None)
            if winner is not None:
                return winner.result()
        if not attempts:
            raise httpcore.ConnectError("the host has no address")
        return attempts[-1].result()
    finally:
        for attempt in attempts:
            if attempt is not winner:
                attempt.cancel()
                attempt.add_done_callback(_close)


def _has_connected(attempt: asyncio.Task[Stream]) -> bool:
    """Return whether the attempt has succeeded. Raise what no other address would be spared."""
    if not attempt.done():
        return False
    error = attempt.exception()
    if error is None or isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout):
        return error is None
    raise error


def _close(attempt: asyncio.Task[Stream]) -> None:
    """Close a connection that was made although it was not wanted any more."""
    if not attempt.cancelled() and attempt.exception() is None:
        task = asyncio.ensure_future(attempt.result().aclose())
        _closing.add(task)
        task.add_done_callback(_closing.discard)
