"""Sending runs beside the reading thread and never takes a message from it."""

import errno
import gc
import select
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq

from keepsight.ipc.codec import Frame
from keepsight.ipc.zmq_socket import ZmqSocket

LIMIT = 20.0


@pytest.fixture
def peer(tmp_path: Path) -> Iterator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    try:
        peer = context.socket(zmq.ROUTER)
        peer.rcvtimeo = int(LIMIT * 1000)
        peer.bind(f"ipc://{tmp_path}/peer")
        yield peer
    finally:
        # Otherwise, if the folder's path is too long for a socket, collecting the context blocks for ever.
        context.destroy(linger=0)


@pytest.fixture
def connected(peer: "zmq.Socket[bytes]", tmp_path: Path) -> Iterator[ZmqSocket[list[Frame]]]:
    """A connected socket whose thread is not started."""
    connected = ZmqSocket[list[Frame]]("connects", "test", max_outbox_bytes=1000, max_unsent=9, max_unread=9)
    connected._socket.connect(f"ipc://{tmp_path}/peer")
    yield connected
    connected.close()


def is_readable(fd: int, seconds: float = 0) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


def send(connected: ZmqSocket[list[Frame]], content: bytes) -> bool:
    return connected.send_or_keep([content], len(content), partial(connected.try_send, [content]))


def test_a_message_that_can_be_sent_does_not_wait_for_the_thread(
    connected: ZmqSocket[list[Frame]], peer: "zmq.Socket[bytes]"
) -> None:
    assert send(connected, b"now")
    assert connected.outbox.is_empty
    assert peer.recv_multipart()[1] == b"now"
    assert not is_readable(connected.outbox.fd)


def test_the_thread_is_woken_for_input_that_a_sender_noticed_first(
    connected: ZmqSocket[list[Frame]], peer: "zmq.Socket[bytes]"
) -> None:
    send(connected, b"question")
    peer.send_multipart([peer.recv_multipart()[0], b"answer"])
    assert is_readable(connected._socket.fileno(), LIMIT)
    send(connected, b"another")
    assert is_readable(connected.outbox.fd)


def test_no_message_overtakes_queued_ones(connected: ZmqSocket[list[Frame]], peer: "zmq.Socket[bytes]") -> None:
    assert connected.outbox.try_put([b"first"], 0)
    assert send(connected, b"second")
    connected.send_waiting(connected.try_send)
    assert send(connected, b"third")
    assert [peer.recv_multipart()[1] for _ in range(3)] == [b"first", b"second", b"third"]


def test_a_closed_socket_sends_nothing(connected: ZmqSocket[list[Frame]]) -> None:
    connected.close()
    assert not send(connected, b"late")


def test_a_failed_socket_creation_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Context, "socket", refuse)
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        with pytest.raises(OSError, match="Too many open files"):
            ZmqSocket[list[Frame]]("connects", "test", max_outbox_bytes=1000, max_unsent=9, max_unread=9)
    gc.collect()
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_a_failed_thread_start_raises_and_the_socket_can_still_be_closed(
    peer: "zmq.Socket[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = set(Path("/proc/self/fd").iterdir())
    unstarted = ZmqSocket[list[Frame]]("connects", "test", max_outbox_bytes=1000, max_unsent=9, max_unread=9)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="can't start new thread"):
        unstarted.start(f"ipc://{tmp_path}/peer", lambda: None, lambda *_: None)
    assert set(Path("/proc/self/fd").iterdir()) <= before
    unstarted.close()
