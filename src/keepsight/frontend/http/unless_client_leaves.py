"""Work for a client that is given up when the client is gone."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def unless_client_leaves(receive: Receive, work: Awaitable[Result]) -> Result:
    """Once the body is read: nothing else can come then.  Raises ClientDisconnect, when the work has ended."""
    here, leaving = asyncio.current_task(), asyncio.ensure_future(receive())
    assert here is not None
    has_left = is_over = False

    def give_up(_: object) -> None:
        nonlocal has_left
        # Being cancelled twice it would not be given the time to end.
        if not is_over and not here.cancelling():
            has_left = here.cancel()

    leaving.add_done_callback(give_up)
    try:
        return await work
    except asyncio.CancelledError:
        # Whoever else wants an end of it comes first.
        if has_left and here.cancelling() == 1:
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        leaving.cancel()
        if has_left:
            here.uncancel()
