"""Who has what a request names is remembered as long as that server is there; `test_router.py` has the rest."""

import asyncio

from keepsight.scaleout.owners import Owners
from keepsight.scaleout.replicas import Replicas
from tests.scaleout.fake_replica import FakeReplica, fakes, say_who


def test_a_server_that_was_removed_is_remembered_no_more() -> None:
    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        owners = Owners(replicas)
        owners._remember("media_1", replicas.add(fake.address))
        assert owners._recall("media_1") is not None
        await replicas.remove(fake.address)
        assert await owners.find(["media_1"], []) is None
        assert not owners._owners

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))
