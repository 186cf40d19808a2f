"""A batch asks a scripted server, within its bounds, and writes what became of each line."""

import asyncio
import io
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from keepsight.batch import answer_batch, silence_watch
from keepsight.batch.answer_batch import MOST_ATTEMPTS, BatchAnswerer, Server, Tally
from keepsight.batch.batch_lines import Request, read_requests
from keepsight.batch.output_file import OutputFile
from keepsight.bench.address import Address
from keepsight.errors import NoAnswerError
from tests.batch.made_up_lines import to_line
from tests.cli.scripted_server import Script, scripted_server
from tests.wait_until import wait_until

LOST = b'{"error": {"message": "lost", "code": "engine_lost"}}'
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
REFUSAL = b'{"error": {"message": "full", "code": "server_overloaded"}}'


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted_server(Script(answers=[[b'{"n": 1}']])) as script:
        yield script


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that were asked for; there are none."""
    asked: list[float] = []
    pause_after = answer_batch._pause_after

    def note(*arguments: Any) -> float:
        asked.append(pause_after(*arguments))
        return 0

    monkeypatch.setattr(answer_batch, "_pause_after", note)
    return asked


class Batch:
    def __init__(self, folder: Path, server: Server) -> None:
        self.path, self.server, self.tally, self.num_done = folder / "out.jsonl", server, Tally(), 0

    def answer(self, lines: Iterable[Request | bytes]) -> list[dict[str, Any]]:
        """Return the lines of the output."""
        output = OutputFile(self.path, is_resumed=self.path.is_file())
        try:
            asyncio.run(BatchAnswerer(self.server, output, self.tally, self._note).run(iter(lines)))
        finally:
            output.close()
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]

    def _note(self) -> None:
        self.num_done += 1


def batch_for(folder: Path, script: Script, **options: Any) -> Batch:
    return Batch(folder, Server(Address.parse(script.url), "secret", **options))


def batch_at(folder: Path, listener: socket.socket) -> Batch:
    host, port = listener.getsockname()
    return Batch(folder, Server(Address(host, port, "/v1", is_secure=False), None))


def lines_of(*custom_ids: str) -> list[Request | bytes]:
    return list(read_requests(io.BytesIO(b"".join(map(to_line, custom_ids))), 1000))


def test_each_line_is_answered_once_and_resuming_asks_only_for_the_others(tmp_path: Path, script: Script) -> None:
    script.headers["X-Request-Id"] = "req-1"
    batch = batch_for(tmp_path, script)
    first = batch.answer(lines_of("a", "b"))
    assert {each["custom_id"] for each in first} == {"a", "b"}
    answer = {"status_code": 200, "request_id": "req-1", "body": {"n": 1}}
    assert all((each["response"], each["error"]) == (answer, None) for each in first)
    assert script.authorizations == ["Bearer secret"] * 2
    assert batch.tally.is_whole
    both = batch.answer(lines_of("a", "c", "b"))
    assert both[:2] == first
    assert [each["custom_id"] for each in both[2:]] == ["c"]
    assert len(script.bodies) == 3
    assert str(batch.tally) == "3 answered (200: 3), 2 answered before"
    assert batch.num_done == 5


def test_bad_lines_are_written_and_not_sent(tmp_path: Path, script: Script) -> None:
    batch = batch_for(tmp_path, script)
    lines = read_requests(io.BytesIO(b"nonsense\n" + to_line()), 1000)
    written = batch.answer(lines)
    assert sorted((each["custom_id"] or "", each["error"] is None) for each in written) == [("", False), ("a", True)]
    assert str(batch.tally) == "1 answered (200: 1), 1 with an error"


def test_a_refusal_is_the_answer_of_its_line(tmp_path: Path, script: Script) -> None:
    script.status, script.refusal = 400, b'{"error": {"message": "no"}}'
    [written] = batch_for(tmp_path, script).answer(lines_of("a"))
    assert (written["response"]["status_code"], written["error"]) == (400, None)
    assert written["response"]["body"] == {"error": {"message": "no"}}
    assert len(script.bodies) == 1


def test_a_server_without_room_is_asked_again_when_it_says_and_its_last_word_counts(
    tmp_path: Path, script: Script, pauses: list[float]
) -> None:
    script.status, script.refusal, script.headers["Retry-After"] = 503, REFUSAL, "2"
    [written] = batch_for(tmp_path, script).answer(lines_of("a"))
    assert written["response"]["status_code"] == 503
    assert len(script.bodies) == MOST_ATTEMPTS
    assert len(pauses) == MOST_ATTEMPTS - 1
    assert all(1.5 <= each <= 2 for each in pauses)


def test_pauses_grow_where_the_server_says_nothing(tmp_path: Path, script: Script, pauses: list[float]) -> None:
    script.status, script.refusal = 429, REFUSAL
    batch_for(tmp_path, script).answer(lines_of("a"))
    assert pauses == sorted(pauses)
    assert 0.375 <= pauses[0] < pauses[-1] <= 4


def test_an_answer_after_a_refusal_for_lack_of_room_counts(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.status, script.refusal = 503, REFUSAL

    def make_room(*_: object) -> float:
        script.status = 200
        return 0

    monkeypatch.setattr(answer_batch, "_pause_after", make_room)
    [written] = batch_for(tmp_path, script).answer(lines_of("a"))
    assert written["response"]["status_code"] == 200
    assert len(script.bodies) == 2


class FragileServer:
    """Loses all that is under way to each request with one of these ids, as if its engines had ended."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fatal: Collection[str], num_losses: int = 1000, num_first: int = 1
    ) -> None:
        """`num_first`: nothing is answered or lost before so many are under way."""
        self._fatal, self._num_losses, self._loss = fatal, num_losses, asyncio.Event()
        self._num_first, self._begun = num_first, asyncio.Event()
        self.num_asked = Counter[str]()
        # How often something was asked while nothing was under way.
        self.num_rounds = 0
        # Those that were under way with a fatal one.
        self.lost: list[set[str]] = []
        self._running: set[str] = set()
        monkeypatch.setattr(BatchAnswerer, "_ask", lambda _, request: self._answer(request))

    async def _answer(self, request: Request) -> answer_batch._Answer:
        name, loss = request.custom_id, self._loss
        self.num_asked[name] += 1
        self.num_rounds += not self._running
        self._running.add(name)
        if len(self._running) == self._num_first:
            self._begun.set()
        await self._begun.wait()
        await asyncio.sleep(0.01)
        if name in self._fatal and len(self.lost) < self._num_losses:
            self.lost.append({*self._running})
            self._loss = asyncio.Event()
            loss.set()
        await asyncio.sleep(0.01)
        self._running.discard(name)
        return answer_batch._Answer(*((503, {}, LOST) if loss.is_set() else (200, {}, b"{}")))


def statuses_of(written: list[dict[str, Any]]) -> dict[str, int]:
    assert len({each["custom_id"] for each in written}) == len(written)
    return {each["custom_id"]: each["response"]["status_code"] for each in written}


def test_lines_that_were_lost_beside_a_fatal_one_are_answered_and_that_one_fails_alone(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FragileServer(monkeypatch, fatal=["f"], num_first=8)
    names = [*"abcdefghij"]
    written = batch_for(tmp_path, script, max_requests=8).answer(lines_of(*names))
    assert statuses_of(written) == dict.fromkeys(names, 200) | {"f": 503}
    assert server.lost[0] == {*"abcdefgh"}
    assert server.lost[-1] == {"f"}
    assert server.num_asked["f"] <= 3
    assert server.num_asked["j"] == 1


def test_lines_that_were_lost_as_the_engines_ended_by_themselves_are_soon_asked_together(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [str(number) for number in range(40)] + ["a"]
    server = FragileServer(monkeypatch, fatal=["a"], num_losses=1, num_first=len(names))
    assert statuses_of(batch_for(tmp_path, script).answer(lines_of(*names))) == dict.fromkeys(names, 200)
    assert {*server.num_asked.values()} == {2}
    assert server.num_rounds == 1 + 6


@pytest.mark.parametrize("num_losses", [1000, 2])
def test_only_those_that_were_lost_together_again_are_asked_one_by_one(
    num_losses: int, tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [str(number) for number in range(100)]
    server = FragileServer(monkeypatch, fatal=["10"], num_losses=num_losses, num_first=len(names))
    written = statuses_of(batch_for(tmp_path, script).answer(lines_of(*names)))
    assert written == dict.fromkeys(names, 200) | {"10": 503 if num_losses > 2 else 200}
    assert len(server.lost[1]) == 8
    assert server.num_rounds <= 1 + 4 + 8 + 7


def test_lines_that_were_lost_are_answered_while_the_next_line_is_waited_for(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of a pipe may wait for them."""
    FragileServer(monkeypatch, fatal="b", num_losses=1, num_first=2)
    batch = batch_for(tmp_path, script)

    def lines() -> Iterator[Request | bytes]:
        yield from lines_of("a", "b")
        wait_until(lambda: batch.num_done == 2)
        yield from lines_of("c")

    assert statuses_of(batch.answer(lines())) == dict.fromkeys("abc", 200)


def test_no_line_is_asked_for_the_first_time_while_some_are_lost(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no more of them are held than may be under way."""
    server = FragileServer(monkeypatch, fatal="abcdef")
    written = batch_for(tmp_path, script, max_requests=2).answer(lines_of(*"abcdef"))
    assert set(statuses_of(written).values()) == {503}
    assert all(any(each <= pair for pair in ({*"ab"}, {*"cd"}, {*"ef"})) for each in server.lost)


def test_a_connection_that_always_ends_early_is_an_error_of_its_line(tmp_path: Path, script: Script) -> None:
    script.headers["Content-Length"] = "1000"
    batch = batch_for(tmp_path, script)
    [written] = batch.answer(lines_of("a"))
    assert (written["custom_id"], written["response"], written["error"]["code"]) == ("a", None, "no_answer")
    assert written["error"]["message"].startswith("line 1: no answer came in 5 attempts: ")
    assert len(script.bodies) == MOST_ATTEMPTS
    assert batch.tally.is_whole


@pytest.fixture
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence_watch, "MAX_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(silence_watch, "SECONDS_BETWEEN_LOOKS", 0.05)


@pytest.mark.usefixtures("is_impatient")
def test_a_server_that_accepts_connections_and_says_nothing_ends_the_run(tmp_path: Path) -> None:
    """Lines that follow would all fail, wave by wave."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        batch = batch_at(tmp_path, listener)
        with pytest.raises(NoAnswerError, match=r"nothing has come from it for 0\.5 s"):
            batch.answer(lines_of("a", "b"))
    assert not batch.tally.is_whole


@pytest.mark.usefixtures("is_impatient")
def test_an_answer_may_take_any_time_while_the_server_says_anything_else(tmp_path: Path, script: Script) -> None:
    script.together = threading.Barrier(2)
    release = threading.Timer(2, script.together.wait)
    release.start()
    [written] = batch_for(tmp_path, script).answer(lines_of("a"))
    release.join()
    assert written["response"]["status_code"] == 200
    assert len(script.bodies) == 1
    assert set(script.authorizations) == {"Bearer secret"}


@pytest.mark.usefixtures("is_impatient")
def test_a_server_that_does_one_thing_after_the_other_is_heard_by_its_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=answer_in_turn, args=(listener,))
        server.start()
        written = batch_at(tmp_path, listener).answer(lines_of(*"abcdefgh"))
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
    assert [each["response"]["status_code"] for each in written] == [200] * 8


@pytest.mark.usefixtures("is_impatient")
def test_a_server_that_ends_and_accepts_nothing_more_may_finish_its_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        batch = batch_at(tmp_path, listener)
        server = threading.Thread(target=answer_last, args=(listener,))
        server.start()
        [written] = batch.answer(lines_of("a"))
        server.join()
    assert written["response"]["status_code"] == 200


def answer_in_turn(listener: socket.socket) -> None:
    """Answer what is posted, and nothing else, until the listener is shut down."""
    with ExitStack() as connections, suppress(OSError):
        while True:
            connection = connections.enter_context(listener.accept()[0])
            with suppress(ConnectionError):  # given up
                if connection.recv(2**16).startswith(b"POST"):
                    time.sleep(0.15)
                    connection.sendall(OK)


def answer_last(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        listener.close()
        connection.recv(2**16)
        time.sleep(1.5)
        connection.sendall(OK)


def test_a_server_that_is_not_there_ends_the_batch_and_leaves_the_rest(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    batch = Batch(tmp_path, Server(Address("127.0.0.1", port, "/v1", is_secure=False), None))
    with pytest.raises(NoAnswerError, match=f"http://127.0.0.1:{port}/v1: "):
        batch.answer(lines_of("a", "b"))
    assert batch.path.read_bytes() == b""
    assert not batch.tally.is_whole


def test_a_server_that_is_not_there_ends_the_batch_while_the_next_line_is_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        batch = batch_at(tmp_path, listener)
    has_ended = threading.Event()

    def lines() -> Iterator[Request | bytes]:
        yield from lines_of("a")
        assert has_ended.wait(30)

    async def run(output: OutputFile) -> None:
        try:
            await BatchAnswerer(batch.server, output, batch.tally, lambda: None).run(lines())
        finally:
            has_ended.set()

    with closing(OutputFile(batch.path, is_resumed=False)) as output, pytest.raises(NoAnswerError):
        asyncio.run(run(output))


def test_what_a_server_says_as_it_ends_is_no_answer(tmp_path: Path, script: Script) -> None:
    script.status, script.refusal = 503, REFUSAL
    batch = batch_for(tmp_path, script, is_ending=lambda: bool(script.bodies))
    assert batch.answer(lines_of("a")) == []
    assert not batch.tally.is_whole


def test_no_line_is_read_once_the_server_ends(tmp_path: Path, script: Script) -> None:
    batch = batch_for(tmp_path, script, is_ending=lambda: len(script.bodies) > 1, max_requests=1)
    assert len(batch.answer(lines_of(*"abcdef"))) < 6
    assert not batch.tally.is_whole


def test_what_is_read_as_the_server_ends_is_neither_sent_nor_written(tmp_path: Path, script: Script) -> None:
    read: list[bytes] = []
    batch = batch_for(tmp_path, script, is_ending=lambda: bool(read))

    def lines() -> Iterator[Request | bytes]:
        read.append(b"half a li")
        yield from read_requests(io.BytesIO(read[0]), 1000)

    assert batch.answer(lines()) == []
    assert script.bodies == []
    assert not batch.tally.is_whole


def test_lines_that_end_because_the_server_does_are_not_the_whole_batch(tmp_path: Path, script: Script) -> None:
    batch = batch_for(tmp_path, script, is_ending=lambda: True)
    batch.answer([])
    assert not batch.tally.is_whole


def test_a_batch_that_is_interrupted_is_not_whole(tmp_path: Path, script: Script) -> None:
    batch = batch_for(tmp_path, script)

    def lines() -> Iterator[Request | bytes]:
        yield from lines_of("a")
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        batch.answer(lines())
    assert not batch.tally.is_whole


def test_an_answer_counts_once_it_is_written(tmp_path: Path, script: Script) -> None:
    batch = batch_for(tmp_path, script)
    batch.path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        batch.answer(lines_of("a"))
    with pytest.raises(OSError, match="No space left"):
        batch.answer(read_requests(io.BytesIO(b"nonsense\n"), 1000))
    assert str(batch.tally) == "0 answered"


def test_as_many_requests_as_allowed_are_under_way(tmp_path: Path, script: Script) -> None:
    script.together = threading.Barrier(3)
    batch = batch_for(tmp_path, script, max_requests=3)
    assert len(batch.answer(lines_of(*"abcdef"))) == 6


def test_answers_are_written_while_the_next_line_is_waited_for(tmp_path: Path, script: Script) -> None:
    batch = batch_for(tmp_path, script)

    def lines() -> Iterator[Request | bytes]:
        yield from lines_of("a")
        wait_until(lambda: batch.num_done == 1)
        yield from lines_of("b")

    assert len(batch.answer(lines())) == 2


@pytest.mark.parametrize("bounds", [{"max_requests": 1}, {"max_bytes": 1}])
def test_lines_are_read_only_as_fast_as_they_are_answered(
    bounds: dict[str, int], tmp_path: Path, script: Script
) -> None:
    batch = batch_for(tmp_path, script, **bounds)

    def lines() -> Iterator[Request | bytes]:
        for number, line in enumerate(lines_of(*"abcd")):
            assert batch.num_done >= number - 1  # one is under way, and the next is held
            yield line

    assert len(batch.answer(lines())) == 4
