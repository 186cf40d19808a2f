import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from keepsight.ipc.control import (
    MISTAKEN,
    ORPHANED,
    Drain,
    Failed,
    GiveUp,
    Ready,
    SupervisorEnd,
    ToProcess,
)

SOON = 20  # seconds
PROGRAM = """
import os, subprocess, sys
from keepsight.errors import CheckpointError
from keepsight.ipc.control import Drain, Ready, run_process
from keepsight.ipc import control as own

def main(control):
    match sys.argv[1]:
        case "wait":
            control.send(Ready())
            control.receive()
            return 0
        case "fail":
            raise CheckpointError("some/model", "is\\nno model")
        case "break":
            control.listen(lambda message: 1 / 0)
            control.send(Ready())
            while True:
                os.read(os.pipe()[0], 1)
        case "live":
            own.SIGN_SECONDS = 0.01
            control.give_signs_of_life(7.5)
            control.receive()
            return 0
        case "inherit":
            return subprocess.run([sys.executable, "-c", "import sys; sys.exit(sys.stdin.read() != '')"]).returncode

sys.exit(run_process(main))
"""


class Process:
    def __init__(self, part: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", PROGRAM, part]
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE)
        self.control = SupervisorEnd(ours)
        ours.settimeout(SOON)

    def wait_until_ready(self) -> None:
        """Wait until the process is ready."""
        assert self.control.connection.recv(1000) == b'{"type":"Ready"}\n'

    def end(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        return self.process.wait(SOON), self.process.stderr.read().decode()


@pytest.fixture
def pair() -> Iterator[tuple[SupervisorEnd, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield SupervisorEnd(ours), theirs


def test_a_process_that_waits_for_work_goes_on_giving_signs_of_life() -> None:
    process, signs = Process("live"), b""
    while signs.count(b"\n") < 3:
        signs += process.control.connection.recv(1000)
    assert signs.startswith(3 * b'{"type":"Alive","max_silent_seconds":7.5}\n')
    assert process.control.try_send(Drain())
    assert process.end()[0] == 0


def test_lines_received_in_pieces_are_joined(pair: tuple[SupervisorEnd, socket.socket]) -> None:
    supervisor, connection = pair
    assert supervisor.take() == ([], True)
    connection.send(b'{"type":"Rea')
    assert supervisor.take() == ([], True)
    connection.send(b'dy"}\n{"type":"Failed","message":"a\\nb"}\n{"ty')
    assert supervisor.take() == ([Ready(), Failed("a\nb")], True)
    connection.close()
    assert supervisor.take() == ([], False)


def test_a_process_that_does_not_read_is_detected_without_blocking(pair: tuple[SupervisorEnd, socket.socket]) -> None:
    supervisor, connection = pair
    for _ in range(100_000):
        if not supervisor.try_send(GiveUp("x" * 1000)):
            break
    else:
        raise AssertionError("it was never noticed")
    connection.close()
    assert not supervisor.try_send(Drain())


def test_a_message_longer_than_the_socket_holds_waits_and_later_ones_follow_it(
    pair: tuple[SupervisorEnd, socket.socket],
) -> None:
    supervisor, connection = pair
    sent: list[ToProcess] = [GiveUp("x" * 5_000_000), Drain(), GiveUp("last")]
    for message in sent:
        assert supervisor.try_send(message)
    assert supervisor.has_unsent
    received = b""
    while supervisor.has_unsent:
        received += connection.recv(100_000)
        assert supervisor.try_flush()
    connection.setblocking(False)
    with suppress(BlockingIOError):
        while chunk := connection.recv(100_000):
            received += chunk
    assert [msgspec.json.decode(line, type=ToProcess) for line in received.splitlines()] == sent


def test_what_waits_for_a_process_that_has_ended_is_given_up(pair: tuple[SupervisorEnd, socket.socket]) -> None:
    supervisor, connection = pair
    assert supervisor.try_send(GiveUp("x" * 5_000_000))
    connection.close()
    assert not supervisor.try_flush()


def test_a_process_ends_when_its_supervisor_closes() -> None:
    process = Process("wait")
    process.wait_until_ready()
    process.control.close()
    assert process.end() == (ORPHANED, "")


def test_a_drained_process_exits_with_status_zero() -> None:
    process = Process("wait")
    process.wait_until_ready()
    assert process.control.try_send(Drain())
    assert process.end() == (0, "")


def test_a_user_error_is_sent_to_the_supervisor_and_not_logged() -> None:
    process = Process("fail")
    assert process.end() == (MISTAKEN, "")
    assert process.control.take()[0] == [Failed("some/model: is\nno model")]


def test_a_process_whose_message_handler_fails_ends() -> None:
    process = Process("break")
    process.wait_until_ready()
    assert process.control.try_send(Drain())
    status, log = process.end()
    assert status == 1
    assert "Drain() could not be followed" in log
    assert "ZeroDivisionError" in log


def test_a_message_that_cannot_be_read_ends_the_process_and_is_logged() -> None:
    """As one of another version. It must not look like the end of the supervisor."""
    process = Process("wait")
    process.wait_until_ready()
    process.control.connection.sendall(b'{"type":"Novelty"}\n')
    status, log = process.end()
    assert status == 1
    assert "a message of the supervisor cannot be read" in log
    assert "was Keepsight changed" in log


def test_child_processes_do_not_inherit_the_control_socket() -> None:
    process = Process("inherit")
    assert process.end() == (0, "")
