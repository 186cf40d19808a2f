import asyncio

import pytest

from keepsight.frontend.api.fair_turns import FairTurns


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
        if has_just_come:
            turns._pass_on()
        second.cancel()
        may_end.set()
        await asyncio.gather(first, third)
        assert second.cancelled() or await asyncio.wait({second})
        async with turns.take("b"):
            begun.append("later")
        assert turns._num_free == 1 + has_just_come
        return begun

    assert asyncio.run(run()) == ["first", "third", "later"]
