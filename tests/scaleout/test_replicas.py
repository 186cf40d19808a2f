"""The set of replicas: which are ready, and changing it while requests run."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from keepsight.errors import InvalidArgumentError, Loss, ReplicaLostError, ServerOverloadedError
from keepsight.scaleout import replicas as replicas_module
from keepsight.scaleout.affinity import Affinity
from keepsight.scaleout.choose_replica import choose_replica
from keepsight.scaleout.replica import Answer, Question, Replica, WholeAnswer
from keepsight.scaleout.replicas import Replicas
from tests.scaleout.fake_replica import Asked, FakeReplica, fakes, respond, say_who
from tests.wait_until import wait_until

QUESTION = Question(b"GET", b"/who", [(b"host", b"x")])
NOTHING = Affinity()
# Too deeply for a decoder.
NESTED = respond('{"x":' + "[" * 100_000 + "]" * 100_000 + "}", is_json=False)


async def wait_for_ready(replicas: Replicas, count: int) -> None:
    async with asyncio.timeout(30):
        while len(replicas.ready) != count:
            await replicas.changed.wait()


async def hold(answer: Answer | WholeAnswer) -> WholeAnswer:
    assert isinstance(answer, Answer)
    return await answer.hold()


def test_replicas_come_and_go_while_requests_run() -> None:
    async def answer_later(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
        replica.told.set()
        await replica.go.wait()
        writer.write(respond("late"))

    async def run(first: FakeReplica, second: FakeReplica) -> None:
        replicas = Replicas()
        added = replicas.add(first.address)
        assert not replicas.ready
        await wait_for_ready(replicas, 1)
        asking = asyncio.create_task(added.forward(QUESTION, NOTHING))
        await asyncio.to_thread(first.told.wait, 30)
        replicas.add(second.address)
        await wait_for_ready(replicas, 2)
        await replicas.remove(first.address)
        assert [each.address for each in replicas.ready] == [second.address]
        first.let_go()
        assert (await hold(await asking)).body == b'"late"'
        assert added.num_requests == 0
        await asyncio.to_thread(wait_until, lambda: first.num_open == 0)
        await replicas.remove(second.address)

    with fakes(answer_later, say_who) as (first, second):
        asyncio.run(run(first, second))


def test_a_replica_that_nobody_listens_at_holds_nothing_any_more() -> None:
    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replica = replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        replica.note_taken(about := Affinity({b"a": 1}))
        assert choose_replica(about, [replica])[1] == "media"
        replicas.note_lost(replica, ReplicaLostError("reset", may_have_begun=True))
        assert not replica.is_ready
        assert choose_replica(about, [replica])[1] == "media"
        replicas.note_lost(replica, ReplicaLostError("refused", False, "gone"))
        assert choose_replica(about, [replica])[1] == "load"
        await wait_for_ready(replicas, 1)  # as it says
        await replicas.remove(fake.address)

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))


def test_what_nobody_asked_for_is_nobodys_answer() -> None:
    async def answer_twice(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(respond(asked.target) + respond("of somebody else"))

    async def run(fake: FakeReplica) -> None:
        replica = Replica(fake.address)
        for number in range(5):
            question = Question(b"GET", b"/%d" % number, QUESTION.headers)
            assert (await (await replica.ask(question)).hold()).body == b'"/%d"' % number

    with fakes(answer_twice) as [fake]:
        asyncio.run(run(fake))


@pytest.mark.parametrize(
    ("said", "num_asked"),
    [
        (b"", 2),
        (b"HTTP/1.1 200", 1),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", 1),
        (b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n", 1),
        (b"SSH-2.0-x\r\n", 1),
    ],
)
def test_only_a_used_connection_that_is_closed_without_a_word_has_a_request_sent_again(
    said: bytes, num_asked: int
) -> None:
    async def answer_odd(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        if asked.target != "/odd":
            await say_who(replica, asked, writer)
            return False
        writer.write(said)
        return True

    async def run(fake: FakeReplica) -> None:
        replica = Replica(fake.address)
        await (await replica.ask(QUESTION)).hold()
        with pytest.raises(ReplicaLostError) as caught:
            await replica.ask(Question(b"GET", b"/odd", QUESTION.headers))
        assert caught.value.may_have_begun
        assert [each.target for each in fake.asked] == ["/who", *["/odd"] * num_asked]

    with fakes(answer_odd) as [fake]:
        asyncio.run(run(fake))


def test_one_that_a_server_does_not_take_in_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.scaleout.replica_connection.WRITE_SECONDS", 0.1)

    async def hang(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await say_who(replica, asked, writer)
        await writer.drain()
        await replica.go.wait()

    async def run(fake: FakeReplica) -> None:
        replica = Replica(fake.address)
        await (await replica.ask(QUESTION)).hold()
        body = bytes(2**25)
        with pytest.raises(ReplicaLostError, match="takes nothing in"):
            await replica.ask(Question(b"POST", b"/", [(b"host", b"x"), (b"content-length", b"%d" % len(body))], body))
        assert fake.num_connections == 1
        fake.let_go()

    with fakes(hang) as [fake]:
        asyncio.run(run(fake))


def test_an_answer_that_was_closed_cannot_be_read() -> None:
    async def run(fake: FakeReplica) -> None:
        answer = await Replica(fake.address).ask(QUESTION)
        await answer.hold()
        with pytest.raises(AssertionError):
            answer.pieces()

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))


def test_requests_to_a_replica_that_hangs_are_given_up_but_for_answers_that_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas_module, "MAX_CHECK_SECONDS", 0.2)
    monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 0.0)

    async def answer(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> bool | None:
        if asked.target == "/begun":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na")
            await replica.go.wait()
            writer.write(b"b")
        else:
            replica.told.set()
            await replica.wait_until_left(writer)
        return True

    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replica = replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        begun = await replica.forward(Question(b"GET", b"/begun", QUESTION.headers), NOTHING)
        asking = asyncio.create_task(replica.forward(QUESTION, NOTHING))
        await asyncio.to_thread(fake.told.wait, 30)
        fake.is_stopped = True
        with pytest.raises(ReplicaLostError, match="hangs") as caught:
            await asking
        assert caught.value.may_have_begun
        assert not replica.is_ready
        fake.let_go()
        assert (await hold(begun)).body == b"ab"
        assert replica.num_requests == 0
        await replicas.remove(fake.address)

    with fakes(answer) as [fake]:
        asyncio.run(run(fake))


@pytest.mark.parametrize(
    ("error", "max_seconds", "is_given_up"),
    [
        (ReplicaLostError("no route", False, "silent"), 0, True),
        (ReplicaLostError("no route", False, "silent"), 1000, False),
        # It listens no more, as it ends.
        (ReplicaLostError("refused", False, "gone"), 0, False),
        (ReplicaLostError("its name cannot be resolved", False), 0, False),
        (ServerOverloadedError("the router may open no more files"), 0, False),
    ],
)
def test_so_are_those_to_a_replica_that_cannot_be_reached_for_as_long(
    error: Exception, max_seconds: float, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 0.0)

    async def answer_later(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
        replica.told.set()
        await replica.go.wait()
        writer.write(respond("late"))

    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replica = replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        asking = asyncio.create_task(replica.forward(QUESTION, NOTHING))
        await asyncio.to_thread(fake.told.wait, 30)
        num_failed = 0

        async def fail(_: Question) -> Any:
            nonlocal num_failed
            num_failed += 1
            raise error

        monkeypatch.setattr(replica, "ask", fail)
        async with asyncio.timeout(30):
            while num_failed == 0:
                await asyncio.sleep(0)
            monkeypatch.setattr(replicas_module, "MAX_CHECK_SECONDS", max_seconds)
            while num_failed < 5:
                await asyncio.sleep(0)
        fake.let_go()
        if is_given_up:
            with pytest.raises(ReplicaLostError, match="cannot be reached"):
                await asking
        else:
            assert (await hold(await asking)).body == b'"late"'
        await replicas.remove(fake.address)

    with fakes(answer_later) as [fake]:
        asyncio.run(run(fake))


def test_only_a_silence_since_the_last_sign_of_life_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, num_checks, is_silent = 0.0, 0, False
    monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 0.0)
    monkeypatch.setattr(replicas_module, "monotonic", lambda: now)

    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replica = replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        asking, ask = asyncio.create_task(replica.forward(QUESTION, NOTHING)), replica.ask

        async def check(question: Question) -> Any:
            nonlocal num_checks
            num_checks += 1
            if is_silent:
                raise ReplicaLostError("no route", False, "silent")
            return await ask(question)

        async def go_on_to(moment: float, becomes_silent: bool) -> None:
            nonlocal now, is_silent
            now, is_silent, before = moment, becomes_silent, num_checks
            async with asyncio.timeout(30):
                while num_checks < before + 3:
                    await asyncio.sleep(0)

        monkeypatch.setattr(replica, "ask", check)
        await go_on_to(1000, False)
        await go_on_to(1000, True)
        await go_on_to(1000 + replicas_module.MAX_CHECK_SECONDS - 1, True)
        assert not asking.done()
        await go_on_to(1000 + replicas_module.MAX_CHECK_SECONDS, True)
        with pytest.raises(ReplicaLostError, match="cannot be reached"):
            async with asyncio.timeout(30):
                await asking
        fake.let_go()
        await replicas.remove(fake.address)

    with fakes(_answer_once_let_go) as [fake]:
        asyncio.run(run(fake))


def test_a_refusal_whose_rest_does_not_come_is_given_up_too() -> None:
    async def refuse_half(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 100\r\n\r\n")
        replica.told.set()
        await replica.wait_until_left(writer)
        return True

    async def run(fake: FakeReplica) -> None:
        replica = Replica(fake.address)
        asking = asyncio.create_task(replica.forward(QUESTION, NOTHING))
        await asyncio.to_thread(fake.told.wait, 30)
        replica.give_up()
        with pytest.raises(ReplicaLostError, match="given up") as caught:
            await asking
        assert caught.value.may_have_begun
        assert replica.num_requests == 0

    with fakes(refuse_half) as [fake]:
        asyncio.run(run(fake))


def test_a_replica_that_ends_is_forgotten_by_its_next_check() -> None:
    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replica = replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        replica.note_taken(about := Affinity({b"a": 1}))
        await asyncio.to_thread(fake.die)
        async with asyncio.timeout(30):
            while replica.count_held_media_bytes(about):
                await asyncio.sleep(0.01)
        await replicas.remove(fake.address)

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))


def test_each_reason_why_a_replica_is_unready_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def wait_until_logged(text: str) -> None:
        async with asyncio.timeout(30):
            while text not in caplog.text:
                await asyncio.sleep(0.01)

    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        fake.state = {"status": "starting"}
        replicas.add(fake.address)
        for status in ("starting", "still starting", "ok", "overloaded"):
            fake.state = {"status": status}
            await wait_until_logged(f"it says {status!r}")
        await replicas.remove(fake.address)

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))
    assert [each.levelname for each in caplog.records if "it says" in each.message] == [*["INFO"] * 3, "WARNING"]


@pytest.mark.parametrize(("how", "level"), [("failed", "INFO"), ("distrusted", "WARNING")])
def test_one_that_never_was_ready_may_be_starting_unless_its_certificate_is_not_trusted(
    how: Loss, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 0.0)
    caplog.set_level("INFO")

    async def run() -> None:
        replicas, failed_twice = Replicas(), asyncio.Event()
        replica = replicas.add("http://127.0.0.1:1")
        reasons = iter(("why", "why"))

        async def fail(_: Question) -> Any:
            if (reason := next(reasons, None)) is None:
                failed_twice.set()
                await asyncio.Event().wait()
            raise ReplicaLostError(str(reason), False, how)

        monkeypatch.setattr(replica, "ask", fail)
        await asyncio.wait_for(failed_twice.wait(), 30)
        await replicas.remove(replica.address)

    asyncio.run(run())
    assert [(each.levelname, each.message) for each in caplog.records if "unready" in each.message] == [
        (level, "http://127.0.0.1:1 is unready: why")
    ]


@pytest.mark.parametrize(
    ("served", "warnings"),
    [
        ([{"model": "1", "names": "2"}] * 3, []),
        ([{"model": "1"}, {}, {"model": "1"}], []),  # one of an older version does not say
        ([{"model": "1", "names": "2"}] * 2 + [{"model": "3", "names": "2"}], [(2, [0, 1], "model")]),
        ([{"model": "1", "names": "2"}] + [{"model": "3", "names": "4"}] * 2, [(1, [0], "model, names")]),
        ([{"model": "1"}, {"model": "1", "adapters": "2"}], [(1, [0], "adapters")]),
    ],
)
def test_replicas_that_do_not_serve_the_same_are_warned_of_once_and_used(
    served: list[dict[str, str]], warnings: list[tuple[int, list[int], str]], caplog: pytest.LogCaptureFixture
) -> None:
    async def run(*fakes: FakeReplica) -> None:
        replicas = Replicas()
        for number, fake in enumerate(fakes, 1):
            replicas.add(fake.address)
            await wait_for_ready(replicas, number)
        await asyncio.sleep(2 * replicas_module.SECONDS_BETWEEN_CHECKS)
        assert len(replicas.ready) == len(fakes)
        for fake in fakes:
            await replicas.remove(fake.address)

    with fakes(*[say_who] * len(served)) as all_of_them:
        for fake, serves in zip(all_of_them, served, strict=True):
            fake.state = {"status": "ok", "serves": serves}
        asyncio.run(run(*all_of_them))
        addresses = [each.address for each in all_of_them]
    assert [each.message for each in caplog.records] == [
        f"{addresses[odd]} does not serve the same as {', '.join(addresses[each] for each in others)}: they differ in "
        f"{fields}. Each request is answered by any of them; nothing is needed while they are updated"
        for odd, others, fields in warnings
    ]


async def wait_for_serves(replicas: Replicas, replica: Replica, serves: dict[str, str]) -> None:
    async with asyncio.timeout(30):
        while replica.serves != serves or not replica.is_ready:
            await asyncio.sleep(0.01)


def serving(version: str) -> dict[str, Any]:
    return {"status": "ok", "serves": {"model": version}}


def with_two_alike(run: Callable[[FakeReplica, FakeReplica], Coroutine[Any, Any, None]]) -> None:
    with fakes(say_who, say_who) as (first, second):
        first.state, second.state = serving("1"), serving("1")
        asyncio.run(run(first, second))


def num_warnings(caplog: pytest.LogCaptureFixture) -> int:
    return len([each for each in caplog.records if "does not serve the same" in each.message])


def test_an_update_of_one_replica_after_the_other_is_warned_of_once_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 0.01)

    async def run(*fakes: FakeReplica) -> None:
        replicas = Replicas()
        added = [replicas.add(fake.address) for fake in fakes]
        for version in ("1", "2", "3"):
            for fake, replica in zip(fakes, added, strict=True):
                fake.state = serving(version)
                await wait_for_serves(replicas, replica, {"model": version})
        for fake in fakes:
            await replicas.remove(fake.address)

    with fakes(say_who, say_who, say_who) as all_of_them:
        asyncio.run(run(*all_of_them))
    assert num_warnings(caplog) == 2


def test_replicas_that_were_all_stopped_and_updated_are_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that gets no requests does not matter."""
    monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 0.01)

    async def run(*fakes: FakeReplica) -> None:
        replicas = Replicas()
        added = [replicas.add(fake.address) for fake in fakes]
        await wait_for_ready(replicas, len(fakes))
        for fake in fakes:
            await asyncio.to_thread(fake.die)
        await wait_for_ready(replicas, 0)
        for fake, replica in zip(fakes, added, strict=True):
            fake.state = serving("2")
            await asyncio.to_thread(fake.listen)
            await wait_for_serves(replicas, replica, {"model": "2"})
        for fake in fakes:
            await replicas.remove(fake.address)

    with_two_alike(run)
    assert num_warnings(caplog) == 0


def test_a_replica_that_serves_something_else_is_warned_of_once_until_all_serve_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 0.01)

    async def run(first: FakeReplica, second: FakeReplica) -> None:
        replicas = Replicas()
        replicas.add(first.address)
        replica = replicas.add(second.address)
        await wait_for_ready(replicas, 2)
        for version, expected in (("2", 1), ("1", 1), ("2", 2)):
            second.state = serving(version)
            await wait_for_serves(replicas, replica, {"model": version})
            for _ in range(2):  # it has no room for a moment
                second.state["status"] = "busy"
                await wait_for_ready(replicas, 1)
                second.state["status"] = "ok"
                await wait_for_ready(replicas, 2)
            assert num_warnings(caplog) == expected
        for fake in (first, second):
            await replicas.remove(fake.address)

    with_two_alike(run)


def test_files_that_the_router_lacks_say_nothing_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(fake: FakeReplica) -> None:
        monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 0.0)
        replicas, failed = Replicas(), asyncio.Event()
        replica = replicas.add(fake.address)
        await wait_for_ready(replicas, 1)

        async def fail(_: Question) -> Any:
            failed.set()
            raise ServerOverloadedError("the router may open no more files")

        monkeypatch.setattr(replica, "ask", fail)
        await asyncio.wait_for(failed.wait(), 30)
        failed.clear()
        await asyncio.wait_for(failed.wait(), 30)
        assert replica.is_ready
        await replicas.remove(fake.address)

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))


def test_no_answer_ends_the_watch_over_a_replica() -> None:
    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        fake.odd_state = NESTED
        await wait_for_ready(replicas, 0)
        fake.odd_state = None
        await wait_for_ready(replicas, 1)
        await replicas.remove(fake.address)

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))


def test_nor_does_an_error_of_our_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 0.0)

    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replica = replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        with monkeypatch.context() as patched:

            async def fail(_: Question) -> Any:
                raise ValueError("of our own")

            patched.setattr(replica, "ask", fail)
            await wait_for_ready(replicas, 0)
        await wait_for_ready(replicas, 1)
        await replicas.remove(fake.address)

    with fakes(say_who) as [fake]:
        asyncio.run(run(fake))
    assert "of our own" in caplog.text


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


async def _answer_once_let_go(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
    replica.told.set()
    await replica.go.wait()
    writer.write(respond("late"))


def test_answers_that_are_needed_no_more_are_not_waited_for_and_their_connections_are_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas_module, "SECONDS_BETWEEN_CHECKS", 1000.0)

    async def run(first: FakeReplica, second: FakeReplica) -> None:
        replicas = Replicas()
        quick, _ = replicas.add(first.address), replicas.add(second.address)
        await wait_for_ready(replicas, 2)
        answers = await replicas.ask_all(QUESTION, 1000, lambda answer: answer.status == 200)
        assert [*answers] == [quick]
        second.let_go()
        async with asyncio.timeout(30):
            while replicas._left:
                await asyncio.sleep(0)
        assert len(await replicas.ask_all(QUESTION, 1000)) == 2
        assert second.num_connections == 1
        for fake in (first, second):
            await replicas.remove(fake.address)

    with fakes(say_who, _answer_once_let_go) as (first, second):
        asyncio.run(run(first, second))


def test_a_question_that_no_replica_can_be_asked_fails_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run(*fakes: FakeReplica) -> None:
        replicas = Replicas()
        for fake in fakes:
            replicas.add(fake.address)
        await wait_for_ready(replicas, len(fakes))
        with pytest.raises(InvalidArgumentError):
            await replicas.ask_all(Question(b"GET", b"/", [(b"host", b"a"), (b"host", b"b")]), 1000)
        for fake in fakes:
            await replicas.remove(fake.address)
        gc.collect()  # when asyncio complains of errors that nobody has seen

    with fakes(say_who, say_who) as both:
        asyncio.run(run(*both))
    assert "never retrieved" not in caplog.text


def test_nobody_is_asked_any_more_for_one_who_left() -> None:
    async def run(fake: FakeReplica) -> None:
        replicas = Replicas()
        replicas.add(fake.address)
        await wait_for_ready(replicas, 1)
        asking = asyncio.create_task(replicas.ask_all(QUESTION, 1000))
        await asyncio.to_thread(fake.told.wait, 30)
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(30):
            while replicas._left:
                await asyncio.sleep(0)
        fake.let_go()
        await replicas.remove(fake.address)

    with fakes(_answer_once_let_go) as [fake]:
        asyncio.run(run(fake))


def test_of_connections_that_wait_only_the_unusable_are_closed() -> None:
    class Connection:
        def __init__(self, is_usable: bool) -> None:
            self.is_usable, self.is_closed = is_usable, False

        def __eq__(self, _: object) -> bool:
            raise AssertionError("each is compared with all others")

        def close(self) -> None:
            self.is_closed = True

    replica: Any = Replica("http://a")
    connections = [Connection(is_usable) for is_usable in (True, False, False, True)]
    replica._idle = list(connections)
    replica.close_unusable()
    assert [each.is_closed for each in connections] == [False, True, True, False]
    assert [id(each) for each in replica._idle] == [id(connections[0]), id(connections[3])]
