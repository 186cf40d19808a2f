"""Work is cancelled when its client leaves, and is over when that is reported."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from keepsight.frontend.http.unless_client_leaves import unless_client_leaves

LEFT = {"type": "http.disconnect"}


class Client:
    def __init__(self) -> None:
        self.leaves = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return LEFT


class Work:
    """Waits for permission to end, and takes a while to be cancelled."""

    def __init__(self) -> None:
        self.may_end, self.is_over = asyncio.Event(), False

    async def run(self) -> str:
        try:
            await self.may_end.wait()
            return "done"
        finally:
            await asyncio.sleep(0.01)
            self.is_over = True


def run(scene: Callable[[Client, Work], Awaitable[None]]) -> None:
    async def play() -> None:
        await scene(Client(), Work())

    asyncio.run(play())


def test_a_client_that_stays_gets_the_result() -> None:
    async def scene(client: Client, work: Work) -> None:
        work.may_end.set()
        assert await unless_client_leaves(client.receive, work.run()) == "done"

    run(scene)


def test_work_is_over_when_its_client_s_leaving_is_reported() -> None:
    async def scene(client: Client, work: Work) -> None:
        asyncio.get_running_loop().call_later(0.01, client.leaves.set)
        with pytest.raises(ClientDisconnect):
            await unless_client_leaves(client.receive, work.run())
        assert work.is_over
        # No cancellation is left over for the next await of this task.
        await asyncio.sleep(0.01)

    run(scene)


def test_a_client_that_left_earlier_is_noticed() -> None:
    async def scene(client: Client, work: Work) -> None:
        client.leaves.set()
        with pytest.raises(ClientDisconnect):
            await unless_client_leaves(client.receive, work.run())

    run(scene)


def test_a_client_that_leaves_as_the_work_ends_causes_no_later_cancellation() -> None:
    async def scene(client: Client, work: Work) -> None:
        async def end_together() -> str:
            client.leaves.set()
            return "done"

        assert await unless_client_leaves(client.receive, end_together()) == "done"
        await asyncio.sleep(0.01)

    run(scene)


def test_exceptions_of_the_work_are_raised() -> None:
    async def scene(client: Client, work: Work) -> None:
        async def fail() -> None:
            raise ValueError("of the work")

        with pytest.raises(ValueError, match="of the work"):
            await unless_client_leaves(client.receive, fail())

    run(scene)


def test_work_that_raises_when_cancelled_leaves_no_cancellation_behind() -> None:
    async def scene(client: Client, work: Work) -> None:
        async def fail_when_cancelled() -> None:
            try:
                await work.run()
            except asyncio.CancelledError as error:
                raise ValueError("of the work") from error

        asyncio.get_running_loop().call_later(0.01, client.leaves.set)
        with pytest.raises(ValueError, match="of the work"):
            await unless_client_leaves(client.receive, fail_when_cancelled())
        # Otherwise the next client's leaving would be taken for a cancellation from outside.
        with pytest.raises(ClientDisconnect):
            await unless_client_leaves(client.receive, Work().run())

    run(scene)


def test_a_client_that_leaves_as_a_timeout_of_the_work_expires_is_noticed() -> None:
    async def scene(client: Client, work: Work) -> None:
        async def work_on_after_a_timeout() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    client.leaves.set()
                    await work.run()
            await asyncio.Event().wait()

        with pytest.raises(ClientDisconnect):
            async with asyncio.timeout(30):
                await unless_client_leaves(client.receive, work_on_after_a_timeout())
        assert work.is_over

    run(scene)


@pytest.mark.parametrize("has_left", [False, True])
def test_a_cancellation_by_the_server_is_not_taken_for_the_client_s(has_left: bool) -> None:
    async def scene(client: Client, work: Work) -> None:
        serving = asyncio.create_task(unless_client_leaves(client.receive, work.run()))
        await asyncio.sleep(0.01)
        if has_left:
            client.leaves.set()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert work.is_over

    run(scene)
