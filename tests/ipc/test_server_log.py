import fcntl
import logging
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
    monkeypatch.setattr(server_log, "PATIENCE_SECONDS", SOON)
    lines = [f"{number} {'x' * (number % 7) * 3000}" for number in range(200)]
    writing = threading.Thread(target=lambda: deque(map(log, lines)), daemon=True)
    writing.start()
    text = ""
    while not re.search(r"^199 .*\n", text, re.MULTILINE):
        text += os.read(ends[0], 1000).decode()
    assert text.splitlines() == lines
    writing.join(SOON)


def test_a_file_is_not_opened_anew_as_it_would_be_overwritten(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        assert open_without_waiting(file.fileno()) == file.fileno()
