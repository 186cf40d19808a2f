"""Who has what a request names is remembered as long as that server is there; `test_router.py` has the rest."""

import asyncio

from keepsight.scaleout.owners import Owners
from keepsight.scaleout.replicas import Replicas
from tests.scaleout.fake_replica import Asked, FakeReplica, fakes, say_who


async def _have_all(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n")


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


def test_uploads_of_a_server_with_two_names_are_on_one_server_whichever_name_answered_first() -> None:
    async def run(*fakes: FakeReplica) -> None:
        replicas = Replicas()
        owners = Owners(replicas)
        first, second = (replicas.add(fake.address) for fake in fakes)
        while len(replicas.ready) < 2:
            await replicas.changed.wait()
        owners._remember("media_1", second)
        owners._remember("media_2", first)
        assert await owners.find(["media_1", "media_2"], [(b"host", b"x")]) is first
        for fake in fakes:
            await replicas.remove(fake.address)

    with fakes(_have_all, _have_all) as both:
        asyncio.run(run(*both))
