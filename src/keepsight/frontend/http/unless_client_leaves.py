"""Cancels work for a client when the client disconnects."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")
SECONDS_BETWEEN_LOOKS = 0.05


async def unless_client_leaves(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of `work`. If the client disconnects, cancel it, and raise ClientDisconnect once it has ended.

    The body must have been read: from then on `receive` returns nothing but the disconnect.
    """
    here, leaving = asyncio.current_task(), asyncio.ensure_future(receive())
    assert here is not None
    has_left = is_over = False

    def give_up(_: object) -> None:
        nonlocal has_left
        if is_over:
            return
        if here.cancelling():
            # Another cancellation would interrupt its cleanup. It may go on after this one: a timeout of its own.
            here.get_loop().call_later(SECONDS_BETWEEN_LOOKS, give_up, None)
        else:
            has_left = here.cancel()

    leaving.add_done_callback(give_up)
    try:
        return await work
    except asyncio.CancelledError:
        # A cancellation from elsewhere takes precedence.
        if has_left and here.cancelling() == 1:
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        leaving.cancel()
        if has_left:
            here.uncancel()
