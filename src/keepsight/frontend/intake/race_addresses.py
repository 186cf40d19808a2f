"""Connects to whichever of a host's addresses answers first ("happy eyeballs", RFC 8305): dead ones cost little."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable

import httpcore

Stream = httpcore.AsyncNetworkStream
Connect = Callable[[str], Coroutine[None, None, Stream]]
# How long an address may take before the next one is tried as well.
HEAD_START_SECONDS = 0.25


async def race_addresses(addresses: Iterable[str], connect: Connect) -> Stream:
    attempts: set[asyncio.Task[Stream]] = set()
    winner: Stream | None = None
    try:
        winner = await _find_first(list(addresses), connect, attempts)
        await _end(attempts)
    except BaseException:
        await _end(attempts)
        if winner is not None:
            await winner.aclose()
        raise
    return winner


async def _find_first(untried: list[str], connect: Connect, attempts: set[asyncio.Task[Stream]]) -> Stream:
    """Return the first connection; leave those still attempted in `attempts`."""
    failure: BaseException = httpcore.ConnectError("the host has no address")
    while untried or attempts:
        if untried:
            attempts.add(asyncio.create_task(connect(untried.pop(0))))
        head_start = HEAD_START_SECONDS if untried else None
        ended, _ = await asyncio.wait(attempts, timeout=head_start, return_when=asyncio.FIRST_COMPLETED)
        for attempt in ended:
            attempts.discard(attempt)
            error = attempt.exception()
            if error is None:
                return attempt.result()
            failure = error
    raise failure


async def _end(attempts: set[asyncio.Task[Stream]]) -> None:
    """Cancel them, and close the connections that were made nevertheless."""
    for attempt in attempts:
        attempt.cancel()
    for ended in await asyncio.gather(*attempts, return_exceptions=True):
        if not isinstance(ended, BaseException):
            await ended.aclose()
    attempts.clear()
