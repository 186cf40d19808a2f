import errno
import fcntl
import itertools
import logging
import os
import re
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from keepsight.ipc import server_log
from keepsight.ipc.server_log import LeavingOut, open_without_waiting

SOON = 20  # seconds
PIPE_BYTES = 4 * 4096
Ends = tuple[int, int]


@pytest.fixture(params=["pipe", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """The descriptors of a log's reader and of its writers."""
    with ExitStack() as stack:
        if request.param == "socket":
            yield tuple(stack.enter_context(end).fileno() for end in socket.socketpair())  # type: ignore[misc]
            return
        ends = os.pipe()
        for end in ends:
            stack.callback(os.close, end)
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        yield ends


@pytest.fixture
def log(ends: Ends) -> Iterator[Callable[[str], None]]:
    """Logs a message."""
    descriptor = open_without_waiting(ends[1])
    handler = LeavingOut(descriptor)

    def log(message: str) -> None:
        handler.handle(logging.LogRecord("name", logging.INFO, "path", 1, message, None, None))

    yield log
    if descriptor != ends[1]:
        os.close(descriptor)


def read_all(reader: int) -> str:
    os.set_blocking(reader, False)
    found = b""
    try:
        while True:
            found += os.read(reader, 65536)
    except BlockingIOError:
        return found.decode()


def test_lines_that_nobody_reads_are_left_out_and_counted(
    ends: Ends, log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_log, "PATIENCE_SECONDS", 0.0)
    reader, writer = ends
    for number in range(5000):
        log(f"{number} {'x' * 200}")
    written = [int(line.split()[0]) for line in read_all(reader).splitlines()]
    assert written == list(range(len(written)))
    assert 10 < len(written) < 5000
    log("last\udcff")
    assert read_all(reader) == f"({5000 - len(written)} lines were left out, as nobody read them)\nlast\\udcff\n"
    log("one more")
    assert read_all(reader) == "one more\n"
    assert os.get_blocking(writer), "others would be surprised"


def test_a_reader_that_is_only_slow_gets_all(
    ends: Ends, log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_log, "PATIENCE_SECONDS", 3600.0)
    lines = [f"{number} {'x' * (number % 7) * 3000}" for number in range(200)]
    writing = threading.Thread(target=lambda: deque(map(log, lines)), daemon=True)
    writing.start()
    text = ""
    while not text.endswith(lines[-1] + "\n"):
        text += os.read(ends[0], 1000).decode()
    assert text.splitlines() == lines
    writing.join(SOON)


def test_a_file_is_not_opened_anew_as_it_would_be_overwritten(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        assert open_without_waiting(file.fileno()) == file.fileno()


class SlowReader:
    """In place of the time and of waiting for room: reads a little now and then, and adds up what it was waited for."""

    def __init__(self, reader: int) -> None:
        os.set_blocking(reader, False)
        self._reader, self._read_next = reader, 0.0
        self._poll = select.poll()
        self.now, self.waited, self.text = 0.0, 0.0, b""

    def register(self, descriptor: int, events: int) -> None:
        self._poll.register(descriptor, events)

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        began, until = self.now, self.now + milliseconds / 1000
        while not (found := self._poll.poll(0)) and self.now < until:
            self.go_on_to(min(self._read_next, until))
        self.waited += self.now - began
        return found

    def sleep(self, seconds: float) -> None:
        self.go_on_to(self.now + seconds)
        self.waited += seconds

    def go_on_to(self, moment: float) -> None:
        self.now = moment
        while self._read_next <= moment:
            self._read_next += 0.9
            with suppress(BlockingIOError):
                self.text += os.read(self._reader, 4096)


def test_a_reader_that_stays_slow_is_waited_for_a_second_a_minute(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SlowReader(ends[0])
    monkeypatch.setattr(server_log, "monotonic", lambda: reader.now)
    monkeypatch.setattr(server_log, "sleep", reader.sleep)
    handler = LeavingOut(open_without_waiting(ends[1]))
    monkeypatch.setattr(handler, "_poll", reader)
    reader.register(handler._descriptor, select.POLLOUT)
    num_lines, waited = 0, list[tuple[float, float]]()
    while reader.now < 600:
        handler.handle(logging.LogRecord("name", logging.INFO, "path", 1, "x" * 199, None, None))
        num_lines += 1
        waited.append((reader.now, reader.waited))
        reader.go_on_to(reader.now + 0.02)
    assert 1 < reader.waited <= 11
    for (begin, before), (end, after) in itertools.combinations(waited[::50], 2):
        assert after - before <= 1 + (end - begin) / 60 + 0.01
    text = (reader.text + read_all(ends[0]).encode()).decode()
    left_out = sum(map(int, re.findall(r"^\((\d+) lines were left out", text, re.MULTILINE)))
    assert num_lines == text.count("x" * 199 + "\n") + left_out + handler._num_left_out
    if handler._descriptor != ends[1]:
        os.close(handler._descriptor)


@pytest.mark.parametrize("kind", ["file", "pipe", "socket"])
def test_a_long_line_is_written_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise other processes' lines get into it."""
    writes = list[bytes]()

    def write(descriptor: int, data: bytes) -> int:
        writes.append(data)
        return len(data)

    def write_vectored(descriptor: int, buffers: list[bytes], offset: int, flags: int) -> int:
        assert (offset, flags) == (-1, os.RWF_NOWAIT)
        if kind == "file":
            raise BlockingIOError("as XFS and btrfs do, however often they are asked")
        return write(descriptor, b"".join(buffers))

    with ExitStack() as stack:
        if kind == "file":
            descriptor = stack.enter_context((tmp_path / "log").open("wb")).fileno()
        elif kind == "socket":
            descriptor = [stack.enter_context(end) for end in socket.socketpair()][1].fileno()
        else:
            pipe = os.pipe()
            descriptor = open_without_waiting(pipe[1])
            for each in {*pipe, descriptor}:
                stack.callback(os.close, each)
        handler = LeavingOut(descriptor)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            patch.setattr(os, "pwritev", write_vectored)
            handler.handle(logging.LogRecord("name", logging.INFO, "path", 1, "x" * 20000, None, None))
    assert writes == [b"x" * 20000 + b"\n"]


def test_an_old_kernel_that_cannot_write_without_waiting_is_not_asked_to(
    ends: Ends, log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "as an old Linux does")

    monkeypatch.setattr(os, "pwritev", refuse)
    log("a line")
    assert read_all(ends[0]) == "a line\n"


@pytest.mark.parametrize("ends", ["pipe"], indirect=True)
def test_a_line_that_stopped_half_way_is_ended_before_the_next(
    ends: Ends, log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_log, "PATIENCE_SECONDS", 0.0)
    log("x" * 10 * PIPE_BYTES)
    log("left out")
    assert set(read_all(ends[0])) == {"x"}
    log("y" * 10 * PIPE_BYTES)
    assert read_all(ends[0]).startswith("\n(2 lines were left out, as nobody read them)\nyy")
    log("last")
    assert read_all(ends[0]) == "\n(1 lines were left out, as nobody read them)\nlast\n"


@pytest.mark.parametrize("ends", ["pipe"], indirect=True)
def test_long_lines_do_not_wait_in_a_pipe_that_cannot_be_opened_anew(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_log, "PATIENCE_SECONDS", 0.0)
    record = logging.LogRecord("name", logging.INFO, "path", 1, "x" * 10 * PIPE_BYTES, None, None)
    writing = threading.Thread(target=LeavingOut(ends[1]).handle, args=(record,), daemon=True)
    writing.start()
    writing.join(SOON)
    assert not writing.is_alive()


class FindsRoomThatAnotherTakes:
    """In place of waiting for room."""

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        return [(0, select.POLLOUT)]


@pytest.mark.parametrize("is_opened_anew", [True, False])
def test_who_finds_room_that_another_process_takes_does_not_wait_for_ever(
    ends: Ends, is_opened_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_log, "PATIENCE_SECONDS", 0.1)
    handler = LeavingOut(open_without_waiting(ends[1]) if is_opened_anew else ends[1])
    monkeypatch.setattr(handler, "_poll", FindsRoomThatAnotherTakes())
    record = logging.LogRecord("name", logging.INFO, "path", 1, "x" * 10**6, None, None)
    writing = threading.Thread(target=handler.handle, args=(record,), daemon=True)
    writing.start()
    writing.join(SOON)
    assert not writing.is_alive()
    assert handler._num_left_out == 1


def test_a_line_whose_room_another_process_takes_is_written_once_there_is_more(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = LeavingOut(open_without_waiting(ends[1]))
    monkeypatch.setattr(handler, "_poll", FindsRoomThatAnotherTakes())
    text = ""

    def read(seconds: float) -> None:
        nonlocal text
        text += read_all(ends[0])

    monkeypatch.setattr(server_log, "sleep", read)
    line = "x" * 10**6
    handler.handle(logging.LogRecord("name", logging.INFO, "path", 1, line, None, None))
    read(0)
    assert text == line + "\n"
