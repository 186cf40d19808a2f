import asyncio

import pytest

from keepsight.frontend.api.fair_turns import FairTurns

SOON = 20  # seconds; normally takes much less


async def hold(turns: FairTurns, tenant: str, name: str, begun: list[str], may_end: asyncio.Event) -> None:
    async with turns.take(tenant):
        begun.append(name)
        await may_end.wait()


async def let_all_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_tenants_have_their_turns_alternately_however_much_one_asks_for() -> None:
    async def run() -> list[str]:
        turns, begun, may_end = FairTurns(2), list[str](), asyncio.Event()
        asked = [("a", f"a{number}") for number in range(6)] + [("b", "b0"), ("c", "c0"), ("b", "b1")]
        tasks = []
        for tenant, name in asked:
            tasks.append(asyncio.create_task(hold(turns, tenant, name, begun, may_end)))
            await let_all_run()
        assert begun == ["a0", "a1"]
        may_end.set()
        await asyncio.gather(*tasks)
        return begun

    assert asyncio.run(run()) == ["a0", "a1", "a2", "b0", "c0", "a3", "b1", "a4", "a5"]


@pytest.mark.parametrize("has_just_come", [False, True])
def test_the_turn_of_one_who_leaves_goes_to_the_next(has_just_come: bool) -> None:
    async def run() -> list[str]:
        turns, begun, may_end = FairTurns(1), list[str](), asyncio.Event()
        first, second, third = (
            asyncio.create_task(hold(turns, "a", name, begun, may_end)) for name in ("first", "second", "third")
        )
        await let_all_run()
        may_end.set()
        if has_just_come:
            await asyncio.sleep(0)  # the first ends, and the second does not know yet
            [[turn]] = turns._waiting.values()
            assert first.done()
            assert not turn.done(), "the third's"
        second.cancel()
        await asyncio.wait_for(asyncio.gather(first, third), SOON)
        assert second.cancelled()
        async with asyncio.timeout(SOON), turns.take("b"):
            begun.append("later")
        assert (turns._num_free, turns._waiting) == (1, {})
        return begun

    assert asyncio.run(run()) == ["first", "third", "later"]


@pytest.mark.parametrize("have_noticed", [True, False])
def test_a_tenant_whose_clients_leave_keeps_its_place(have_noticed: bool) -> None:
    async def run() -> list[str]:
        turns, begun, may_end = FairTurns(1), list[str](), asyncio.Event()
        asked = [("a", "a0"), ("b", "b0"), ("b", "b1"), ("b", "b2"), ("c", "c0"), ("c", "c1"), ("d", "d0")]
        tasks = {name: asyncio.create_task(hold(turns, tenant, name, begun, may_end)) for tenant, name in asked}
        await let_all_run()
        leaving = [tasks.pop(name) for name in ("b0", "b1", "d0")]
        if not have_noticed:
            may_end.set()  # the turn is passed on before their tasks run
        for each in leaving:
            each.cancel()
        if have_noticed:
            await let_all_run()
            may_end.set()
        await asyncio.wait_for(asyncio.gather(*tasks.values()), SOON)
        assert (turns._num_free, turns._waiting) == (1, {})
        return begun

    assert asyncio.run(run()) == ["a0", "b2", "c0", "c1"]
