import asyncio
from typing import cast

import httpcore
import pytest

from keepsight.frontend.intake import race_addresses as module
from keepsight.frontend.intake.race_addresses import Stream, race_addresses


class FakeStream:
    def __init__(self, address: str) -> None:
        self.address, self.is_closed = address, False

    async def aclose(self) -> None:
        self.is_closed = True


class FakeNetwork:
    """Addresses that answer or refuse at once, and others that do so once `may_answer` is set."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.canceled: list[str] = []
        self.made: list[FakeStream] = []
        self.may_answer = asyncio.Event()

    async def connect(self, address: str) -> Stream:
        self.tried.append(address)
        if address.startswith("refuses"):
            raise httpcore.ConnectError(address)
        assert not address.startswith("breaks"), address
        if not address.startswith("answers"):
            try:
                await self.may_answer.wait()
            except asyncio.CancelledError:
                self.canceled.append(address)
                if not address.startswith("stubborn"):
                    raise
        if address.startswith("fails late"):
            raise httpcore.ConnectTimeout(address)
        self.made.append(FakeStream(address))
        return cast(Stream, self.made[-1])


async def race(network: FakeNetwork, *addresses: str) -> str:
    return cast(FakeStream, await race_addresses(addresses, network.connect)).address


async def until_nothing_is_left() -> None:
    for _ in range(2):  # tasks that ended may begin others
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
def no_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_START_SECONDS", 0.0)


def test_an_address_that_answers_is_the_only_one_tried() -> None:
    async def run() -> None:
        network = FakeNetwork()
        assert await race(network, "answers 1", "answers 2") == "answers 1"
        assert network.tried == ["answers 1"]

    asyncio.run(run())


def test_an_address_that_refuses_has_no_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_START_SECONDS", 3600.0)
    assert asyncio.run(race(FakeNetwork(), "refuses 1", "refuses 2", "answers 3")) == "answers 3"


@pytest.mark.usefixtures("no_head_start")
def test_addresses_that_do_not_answer_are_passed_and_their_attempts_end() -> None:
    async def run() -> None:
        network = FakeNetwork()
        assert await race(network, "silent 1", "silent 2", "answers 3", "answers 4") == "answers 3"
        await until_nothing_is_left()
        assert sorted(network.canceled) == ["silent 1", "silent 2"]
        assert [stream.is_closed for stream in network.made] == [False]

    asyncio.run(run())


@pytest.mark.usefixtures("no_head_start")
def test_the_earlier_address_may_still_win() -> None:
    async def run() -> None:
        network = FakeNetwork()
        first = asyncio.create_task(race(network, "late 1", "refuses 2"))
        while network.tried != ["late 1", "refuses 2"]:
            await asyncio.sleep(0)
        network.may_answer.set()
        assert await first == "late 1"

    asyncio.run(run())


@pytest.mark.usefixtures("no_head_start")
def test_of_two_that_answer_at_once_one_is_closed() -> None:
    async def run() -> None:
        network = FakeNetwork()
        first = asyncio.create_task(race(network, "late 1", "late 2"))
        while len(network.tried) < 2:
            await asyncio.sleep(0)
        network.may_answer.set()
        winner = await first
        await until_nothing_is_left()
        assert {stream.address: stream.is_closed for stream in network.made} == {
            address: address != winner for address in ("late 1", "late 2")
        }

    asyncio.run(run())


@pytest.mark.usefixtures("no_head_start")
def test_an_attempt_that_connects_although_it_was_canceled_is_closed() -> None:
    async def run() -> None:
        network = FakeNetwork()
        assert await race(network, "stubborn 1", "answers 2") == "answers 2"
        await until_nothing_is_left()
        assert {stream.address: stream.is_closed for stream in network.made} == {"stubborn 1": True, "answers 2": False}

    asyncio.run(run())


@pytest.mark.usefixtures("no_head_start")
@pytest.mark.parametrize("second_name", ["silent 2", "stubborn 2", "late 2"])
@pytest.mark.parametrize("num_turns", range(4))
@pytest.mark.parametrize("num_cancels", [1, 2])
def test_a_race_that_is_canceled_leaves_nothing_behind(num_cancels: int, num_turns: int, second_name: str) -> None:
    async def run() -> None:
        network = FakeNetwork()
        first = asyncio.create_task(race(network, "silent 1", second_name))
        while len(network.tried) < 2:
            await asyncio.sleep(0)
        if second_name == "late 2":
            network.may_answer.set()
        for _ in range(num_cancels):
            for _ in range(num_turns):
                await asyncio.sleep(0)
            first.cancel()
        [winner] = await asyncio.gather(first, return_exceptions=True)
        await until_nothing_is_left()
        assert [stream.address for stream in network.made if not stream.is_closed] in ([], [winner])

    asyncio.run(run())


def test_the_failure_of_the_last_address_is_told_and_no_address_is_a_failure() -> None:
    with pytest.raises(httpcore.ConnectError, match="refuses 2"):
        asyncio.run(race(FakeNetwork(), "refuses 1", "refuses 2"))


@pytest.mark.usefixtures("no_head_start")
def test_the_failure_of_the_last_address_is_told_even_if_another_fails_later() -> None:
    async def run() -> None:
        network = FakeNetwork()
        first = asyncio.create_task(race(network, "fails late 1", "refuses 2"))
        while len(network.tried) < 2:
            await asyncio.sleep(0)
        network.may_answer.set()
        with pytest.raises(httpcore.ConnectError, match="refuses 2"):
            await first

    asyncio.run(run())


@pytest.mark.usefixtures("no_head_start")
def test_what_is_not_about_the_address_is_raised_at_once() -> None:
    with pytest.raises(AssertionError, match="breaks 1"):
        asyncio.run(race(FakeNetwork(), "breaks 1", "answers 2"))


def test_without_an_address_nothing_is_reached() -> None:
    with pytest.raises(httpcore.ConnectError, match="no address"):
        asyncio.run(race(FakeNetwork()))
