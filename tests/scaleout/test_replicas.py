"""The set of replicas: which are ready, and changing it while requests run."""

import asyncio

from keepsight.errors import ReplicaLostError
from keepsight.scaleout.affinity import Affinity
from keepsight.scaleout.choose_replica import choose_replica
from keepsight.scaleout.replica import Question
from keepsight.scaleout.replicas import Replicas
from tests.scaleout.fake_replica import Asked, FakeReplica, fakes, respond, say_who

QUESTION = Question(b"GET", b"/who", [(b"host", b"x")])
NOTHING = Affinity()


async def wait_for_ready(replicas: Replicas, count: int) -> None:
    async with asyncio.timeout(30):
        while len(replicas.ready) != count:
            await replicas.wait_for_change()


def test_replicas_come_and_go_while_requests_run() -> None:
    async def answer_later(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
        replica.told.set()
        await replica.go.wait()
        writer.write(respond("late"))

    async def run(first: FakeReplica, second: FakeReplica) -> None:
        replicas = Replicas()
        added = replicas.add(first.address)
        assert (added.state, list(replicas.ready)) == ("unknown", [])
        await wait_for_ready(replicas, 1)
        asking = asyncio.create_task(added.ask(QUESTION, NOTHING))
        await asyncio.to_thread(first.told.wait, 30)
        replicas.add(second.address)
        await wait_for_ready(replicas, 2)
        await replicas.remove(first.address)
        assert [each.address for each in replicas.ready] == [second.address]
        first.let_go()
        assert await (await asking).hold() == b'"late"'
        assert added.num_requests == 0
        await replicas.remove(second.address)

    with fakes(answer_later, say_who) as (first, second):
        asyncio.run(run(first, second))


def test_a_replica_that_nobody_listens_at_holds_nothing_any_more() -> None:
    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replica = replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        replica.note_sent(about := Affinity({b"a": 1}))
        assert choose_replica(about, [replica])[1] == "media"
        replicas.note_lost(replica, ReplicaLostError("reset", may_have_begun=True))
        assert replica.state == "unready"
        assert choose_replica(about, [replica])[1] == "media"
        replicas.note_lost(replica, ReplicaLostError("refused", may_have_begun=False))
        assert choose_replica(about, [replica])[1] == "load"
        await wait_for_ready(replicas, 1)  # as it says
        await replicas.remove(fake.address)

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))


def test_connections_are_used_again_and_closed_with_the_replica() -> None:
    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replica = replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        for _ in range(5):
            await (await replica.ask(QUESTION)).hold()
        assert fake.num_connections <= 2  # one of them is being asked whether it is ready
        await replicas.remove(fake.address)

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))
