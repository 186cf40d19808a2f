"""Real sockets: messages arrive, strangers are ignored, and each side notices when the other one ends."""

import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from keepsight.errors import HandshakeError
from keepsight.ipc.channel import MAX_OUTBOX_BYTES_TO_ENGINE, EngineListener, FrontendChannel
from keepsight.ipc.codec import encode_to_engine
from keepsight.ipc.handshake import PROTOCOL_VERSION, Hello, Welcome, encode_hello
from keepsight.ipc.outbox import Outbox
from keepsight.requests import (
    MAX_PIXEL_BYTES,
    AbortRequest,
    EngineRequest,
    FromEngine,
    MediaArrived,
    MediaHeld,
    Received,
    RequestFailed,
    ResetCaches,
    ToEngine,
    TokenOutput,
    UnreadableMedia,
)
from keepsight.sampling_params import SamplingParams
from tests.ipc.drawn_messages import comparable

LIMIT = 20.0
WELCOME = Welcome(128)
REQUEST = EngineRequest("7", (1, 2, 3), (), SamplingParams())


class Engine:
    """A listener that records the messages it receives."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        self.received = queue.Queue[tuple[str, Received]]()
        self.lost = queue.Queue[str]()
        self.listener = EngineListener(
            endpoint,
            WELCOME,
            lambda *received: self.received.put(received),
            lambda lost: self.lost.put(lost),
            **options,
        )


class Frontend:
    """A channel that records the messages it receives."""

    def __init__(self, endpoint: str, name: str = "a", **options: Any) -> None:
        self.received = queue.Queue[Sequence[FromEngine]]()
        self.lost = queue.Queue[str]()
        self.channel = FrontendChannel(endpoint, name, self.received.put, self.lost.put, **options)

    def connect(self) -> "Frontend":
        self.channel.connect(LIMIT)
        return self


class Stranger:
    """A raw socket that does not follow the protocol."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(LIMIT * 1000)
        self.socket.connect(endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine"


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    """Close each object passed to it at the end of the test, in the order of opening."""
    things: list[Any] = []

    def open_(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield open_
    for thing in things:
        (getattr(thing, "listener", None) or getattr(thing, "channel", None) or thing).close()


@pytest.fixture
def engine(endpoint: str, opened: Callable[[Any], Any]) -> Engine:
    made: Engine = opened(Engine(endpoint))
    return made


@pytest.fixture
def frontend(engine: Engine, endpoint: str, opened: Callable[[Any], Any]) -> Frontend:
    made: Frontend = opened(Frontend(endpoint))
    return made.connect()


class TestMessages:
    def test_messages_of_a_frontend_arrive_in_order(self, engine: Engine, frontend: Frontend) -> None:
        pixels = np.arange(300 * 300 * 3, dtype=np.uint8).reshape(300, 300, 3)
        messages: list[ToEngine] = [
            REQUEST,
            MediaArrived("hash", pixels),
            AbortRequest("7"),
            ResetCaches("reset", prefix=True),
        ]
        for message in messages:
            assert frontend.channel.send(message)
        for message in messages:
            name, received = engine.received.get(timeout=LIMIT)
            assert (name, comparable(received)) == ("a", comparable(message))

    def test_messages_of_an_engine_reach_the_frontend_they_are_addressed_to(
        self, engine: Engine, frontend: Frontend, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        other: Frontend = opened(Frontend(endpoint, "b")).connect()
        engine.listener.send("a", [TokenOutput("7", 0, 1), TokenOutput("7", 0, 2)])
        engine.listener.send("b", [TokenOutput("8", 0, 3)])
        engine.listener.send("nobody", [TokenOutput("9", 0, 4)])
        engine.listener.send_to_all([MediaHeld(("hash",))])
        assert frontend.received.get(timeout=LIMIT) == [TokenOutput("7", 0, 1), TokenOutput("7", 0, 2)]
        assert other.received.get(timeout=LIMIT) == [TokenOutput("8", 0, 3)]
        assert frontend.received.get(timeout=LIMIT) == other.received.get(timeout=LIMIT) == [MediaHeld(("hash",))]

    def test_a_long_list_of_held_media_reaches_all_frontends(
        self, engine: Engine, frontend: Frontend, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        other: Frontend = opened(Frontend(endpoint, "b")).connect()
        # One message of these would exceed the limit.
        names = tuple(f"{number:0128x}" for number in range(520_000))
        engine.listener.send_to_all([MediaHeld(names), MediaHeld(("last",))])
        for each in (frontend, other):
            told: list[str] = []
            while not told or told[-1] != "last":
                for output in each.received.get(timeout=LIMIT):
                    assert isinstance(output, MediaHeld)
                    told += output.media_hashes
            assert tuple(told) == (*names, "last")
            assert each.lost.empty()

    def test_many_threads_may_send_without_loss(self, engine: Engine, frontend: Frontend) -> None:
        def send(sender: int) -> None:
            for number in range(100):
                assert frontend.channel.send(AbortRequest(f"{sender} {number}"))

        threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        received = [engine.received.get(timeout=LIMIT)[1] for _ in range(400)]
        for sender in range(4):
            expected = [AbortRequest(f"{sender} {number}") for number in range(100)]
            assert [
                m for m in received if isinstance(m, AbortRequest) and m.request_id.startswith(f"{sender} ")
            ] == expected

    def test_both_sides_may_send_at_once_without_loss(self, engine: Engine, frontend: Frontend) -> None:
        count = 3000

        def send_from_engine() -> None:
            for number in range(count):
                assert engine.listener.send("a", [TokenOutput("7", 0, number)])

        thread = threading.Thread(target=send_from_engine)
        thread.start()
        for number in range(count):
            assert frontend.channel.send(AbortRequest(str(number)))
        thread.join()
        assert [engine.received.get(timeout=LIMIT)[1] for _ in range(count)] == [
            AbortRequest(str(number)) for number in range(count)
        ]
        assert [frontend.received.get(timeout=LIMIT) for _ in range(count)] == [
            [TokenOutput("7", 0, number)] for number in range(count)
        ]

    def test_messages_queued_for_a_busy_engine_keep_their_order(
        self, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        may_continue, received = threading.Event(), queue.Queue[Received]()

        def wait(_name: str, message: Received) -> None:
            may_continue.wait(LIMIT)
            received.put(message)

        opened(EngineListener(endpoint, WELCOME, wait, lambda _: None))
        frontend: Frontend = opened(Frontend(endpoint)).connect()
        # Larger than the kernel's buffers for a connection.
        pictures = [MediaArrived(str(number), np.zeros((600, 600, 3), np.uint8)) for number in range(60)]
        for number, picture in enumerate(pictures):
            if number == 40:
                assert not frontend.channel._io.outbox.is_empty
                may_continue.set()
            assert frontend.channel.send(picture)
            assert frontend.channel.send(AbortRequest(str(number)))
        names = [
            message.media_hash if isinstance(message, MediaArrived) else message.request_id
            for message in (received.get(timeout=LIMIT) for _ in range(120))
            if isinstance(message, MediaArrived | AbortRequest)
        ]
        assert names == [str(number) for number in range(60) for _ in range(2)]


class TestHandshake:
    def test_connect_waits_for_the_engine(self, endpoint: str, opened: Callable[[Any], Any]) -> None:
        frontend: Frontend = opened(Frontend(endpoint))
        welcomes = queue.Queue[Welcome]()
        connecting = threading.Thread(target=lambda: welcomes.put(frontend.channel.connect(LIMIT)))
        connecting.start()
        opened(Engine(endpoint))
        assert welcomes.get(timeout=LIMIT) == WELCOME
        connecting.join()

    def test_connect_without_an_engine_times_out(self, endpoint: str) -> None:
        with pytest.raises(HandshakeError, match="no engine answered"):
            Frontend(endpoint).channel.connect(0.05)

    def test_another_protocol_version_is_refused_with_both_versions(
        self, engine: Engine, endpoint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        frontend = Frontend(endpoint)
        frontend.channel._hello = [b"H", b"99", b"?"]
        with pytest.raises(
            HandshakeError, match=f"frontend speaks version 99 of the protocol, the engine {PROTOCOL_VERSION}"
        ):
            frontend.channel.connect(LIMIT)
        assert not frontend.channel.send(REQUEST)
        assert frontend.lost.empty()

    def test_a_frontend_of_another_version_is_logged_once_however_often_it_tries(
        self, engine: Engine, endpoint: str, opened: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        stranger: Stranger = opened(Stranger(endpoint))
        for version in (b"99", b"99", b"98", b"98"):
            stranger.socket.send_multipart([b"H", version, b"?"])
            assert stranger.socket.recv_multipart()[0] == b"X"
        assert [re.findall(r"version (\d+)", line) for line in caplog.messages] == [["99"], ["98"]]

    def test_nothing_is_sent_before_the_handshake(
        self, engine: Engine, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        assert not opened(Frontend(endpoint)).channel.send(REQUEST)

    def test_a_closed_channel_does_not_connect(self, engine: Engine, endpoint: str) -> None:
        frontend = Frontend(endpoint)
        frontend.channel.close()
        with pytest.raises(HandshakeError, match="closed"):
            frontend.channel.connect(LIMIT)

    def test_a_new_frontend_replaces_the_one_of_the_same_name(
        self, engine: Engine, frontend: Frontend, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        again: Frontend = opened(Frontend(endpoint)).connect()
        assert engine.lost.get(timeout=LIMIT) == "a"
        assert "another frontend" in frontend.lost.get(timeout=LIMIT)
        engine.listener.send("a", [MediaHeld(())])
        assert again.received.get(timeout=LIMIT) == [MediaHeld(())]
        assert frontend.received.empty()

    def test_messages_for_a_replaced_frontend_are_not_sent_to_its_successor(
        self, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        engine: Engine = opened(Engine(endpoint))
        opened(Frontend(endpoint)).connect()
        # The first frontend is gone, and the second is not connected yet.
        engine.lost.put = lambda name: engine.listener.send(name, [TokenOutput("7", 0, 1)])  # type: ignore
        again: Frontend = opened(Frontend(endpoint)).connect()
        engine.listener.send("a", [TokenOutput("7", 0, 2)])
        assert again.received.get(timeout=LIMIT) == [TokenOutput("7", 0, 2)]


class TestStrangers:
    def test_a_peer_without_a_valid_greeting_is_refused_and_ignored(
        self, engine: Engine, frontend: Frontend, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        stranger: Stranger = opened(Stranger(endpoint))
        for garbage in ([b""], [b"H"], [b"H", b"1", b"?"], [b"\xff" * 100, b"Q"], encode_to_engine(REQUEST)):
            stranger.socket.send_multipart(garbage)
            assert stranger.socket.recv_multipart()[0] == b"X"
        assert frontend.channel.send(REQUEST)
        assert engine.received.get(timeout=LIMIT) == ("a", REQUEST)
        assert engine.received.empty()
        assert engine.lost.empty()

    def test_an_unreadable_message_is_reported_to_its_sender_and_logged_once(
        self, engine: Engine, endpoint: str, opened: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        stranger: Stranger = opened(Stranger(endpoint))
        stranger.socket.send_multipart(encode_hello(Hello("b")))
        assert stranger.socket.recv_multipart()[0] == b"W"
        for frames in ([b"?"], [b"A", b"\x81"], [b"Q", msgspec.msgpack.encode({"request_id": "9"})]):
            stranger.socket.send_multipart(frames)
        kind, body = stranger.socket.recv_multipart()
        assert kind == b"O"
        assert b"could not read" in body
        stranger.socket.send_multipart(encode_to_engine(REQUEST))
        assert engine.received.get(timeout=LIMIT) == ("b", REQUEST)
        assert sum("unreadable message" in record.message for record in caplog.records) == 1

    def test_media_that_cannot_be_read_are_handed_on_as_such(
        self, engine: Engine, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        stranger: Stranger = opened(Stranger(endpoint))
        stranger.socket.send_multipart(encode_hello(Hello("b")))
        assert stranger.socket.recv_multipart()[0] == b"W"
        stranger.socket.send_multipart([b"P", msgspec.msgpack.encode(("cat", (2, 2, 5))), b"x" * 20])
        reason = "the engine could not read the pixels of cat: not a shape of pixels: (2, 2, 5)"
        assert engine.received.get(timeout=LIMIT) == ("b", UnreadableMedia("cat", reason))
        stranger.socket.send_multipart(encode_to_engine(REQUEST))
        assert engine.received.get(timeout=LIMIT) == ("b", REQUEST)

    def test_an_engine_that_sends_an_unreadable_message_counts_as_lost(
        self, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        engine: Engine = opened(Engine(endpoint))
        frontend: Frontend = opened(Frontend(endpoint)).connect()
        engine.listener._io.outbox.try_put(("a", [b"O", b"?"]), 0)
        assert frontend.lost.get(timeout=LIMIT)
        assert not frontend.channel.send(REQUEST)


class TestBounds:
    def test_a_frontend_that_does_not_read_is_disconnected_and_others_continue(
        self, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        engine: Engine = opened(Engine(endpoint, max_messages_from_engine=4))
        stranger: Stranger = opened(Stranger(endpoint))
        stranger.socket.rcvhwm = 1
        stranger.socket.connect(endpoint)
        stranger.socket.send_multipart(encode_hello(Hello("slow")))
        assert stranger.socket.recv_multipart()[0] == b"W"
        frontend: Frontend = opened(Frontend(endpoint)).connect()
        large = [RequestFailed("7", "x" * 1_000_000)]
        num_sent = 0
        while engine.lost.empty() and num_sent < 2000:
            assert engine.listener.send("slow", large)
            engine.listener.send("a", [MediaHeld((str(num_sent),))])
            assert frontend.received.get(timeout=LIMIT) == [MediaHeld((str(num_sent),))]
            num_sent += 1
        assert engine.lost.get(timeout=LIMIT) == "slow"
        # Once it reads again, it learns that it was disconnected.
        while (frames := stranger.socket.recv_multipart())[0] == b"O":
            pass
        assert frames == [b"X", b"it did not read what the engine sent"]

    def test_behind_the_largest_item_there_is_room_for_more(self) -> None:
        outbox = Outbox[str](MAX_OUTBOX_BYTES_TO_ENGINE)
        assert outbox.try_put("largest", MAX_PIXEL_BYTES + 4096)
        assert outbox.try_put("more", 512 * 2**20)

    def test_the_queue_for_a_busy_engine_is_bounded(self, endpoint: str, opened: Callable[[Any], Any]) -> None:
        may_continue = threading.Event()

        def wait(_name: str, _message: Received) -> None:
            may_continue.wait(LIMIT)

        listener: EngineListener = opened(EngineListener(endpoint, WELCOME, wait, lambda _: None))
        frontend: Frontend = opened(Frontend(endpoint, max_outbox_bytes=4_000_000)).connect()
        picture = MediaArrived("hash", np.zeros((600, 600, 3), np.uint8))
        num_taken = 0
        while frontend.channel.send(picture) and num_taken < 1000:
            num_taken += 1
        assert 3 <= num_taken < 1000
        # A client would wait for the dropped messages for ever, so the connection counts as lost.
        assert "does not read" in frontend.lost.get(timeout=LIMIT)
        may_continue.set()
        listener.close()


class TestEnds:
    def test_a_frontend_that_closes_is_lost(self, engine: Engine, frontend: Frontend) -> None:
        frontend.channel.close()
        assert engine.lost.get(timeout=LIMIT) == "a"
        assert not frontend.channel.send(REQUEST)
        assert frontend.lost.empty()

    def test_a_closed_engine_is_lost_after_its_last_messages_arrived(self, engine: Engine, frontend: Frontend) -> None:
        engine.listener.send("a", [MediaHeld(())])
        assert frontend.received.get(timeout=LIMIT) == [MediaHeld(())]
        engine.listener.close()
        assert "ended" in frontend.lost.get(timeout=LIMIT)
        assert not frontend.channel.send(REQUEST)
        assert not engine.listener.send("a", [])
        assert engine.lost.empty()

    def test_a_new_engine_at_the_same_place_takes_new_channels(
        self, engine: Engine, frontend: Frontend, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        engine.listener.close()
        frontend.lost.get(timeout=LIMIT)
        second: Engine = opened(Engine(endpoint))
        again: Frontend = opened(Frontend(endpoint)).connect()
        assert again.channel.send(REQUEST)
        assert second.received.get(timeout=LIMIT) == ("a", REQUEST)

    def test_a_removed_frontend_is_notified(self, engine: Engine, frontend: Frontend) -> None:
        engine.listener.forget("a")
        engine.listener.forget("nobody")
        assert "has dropped this frontend" in frontend.lost.get(timeout=LIMIT)
        assert engine.lost.empty()

    def test_a_callback_may_close_its_own_end(
        self, engine: Engine, endpoint: str, opened: Callable[[Any], Any]
    ) -> None:
        closed = threading.Event()

        def close(_outputs: Sequence[FromEngine]) -> None:
            channel.close()
            closed.set()

        channel: FrontendChannel = opened(FrontendChannel(endpoint, "a", close, lambda _: None))
        channel.connect(LIMIT)
        engine.listener.send("a", [])
        assert closed.wait(LIMIT)
        assert engine.lost.get(timeout=LIMIT) == "a"

    def test_both_may_close_at_any_time_more_than_once_and_from_several_threads(self, tmp_path: Path) -> None:
        for number in range(10):
            endpoint = f"ipc://{tmp_path}/{number}"
            engine, frontend = Engine(endpoint), Frontend(endpoint).connect()
            jobs: list[Callable[[], object]] = [engine.listener.close, frontend.channel.close] * 2
            jobs += [partial(frontend.channel.send, REQUEST), partial(engine.listener.send, "a", [])] * 20
            threads = [threading.Thread(target=job) for job in jobs[::-1]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT)
                assert not thread.is_alive()

    def test_frontends_that_connect_and_leave_quickly_leave_no_peer_behind(
        self, engine: Engine, frontend: Frontend, endpoint: str
    ) -> None:
        context = zmq.Context()
        for number in range(100):
            socket = context.socket(zmq.DEALER)
            socket.connect(endpoint)
            socket.send_multipart(encode_hello(Hello(f"brief {number}")))
            if number % 2:
                socket.recv_multipart()
            # The kernel reuses the connection's fd at once, while the greeting may arrive late.
            socket.close(linger=1000)
        context.term()
        for _ in range(10_000):
            is_alone = [peer.frontend_id for peer in engine.listener._peers.all()] == ["a"]
            # An answer means that the listener has processed all earlier events.
            assert frontend.channel.send(REQUEST)
            assert engine.received.get(timeout=LIMIT) == ("a", REQUEST)
            if is_alone:
                break
        else:
            pytest.fail(f"still there: {engine.listener._peers.all()}")
        engine.listener._peers.check_invariants()
        lost = [engine.lost.get_nowait() for _ in range(engine.lost.qsize())]
        assert len(lost) == len(set(lost))
        assert {f"brief {number}" for number in range(1, 100, 2)} <= set(lost)

    def test_an_impossible_endpoint_raises_oserror(self, tmp_path: Path) -> None:
        with pytest.raises(OSError):
            Engine(f"ipc://{tmp_path}/no/such/folder")


FRONTEND_PROGRAM = """
import sys, time
from keepsight.ipc.channel import FrontendChannel
channel = FrontendChannel(sys.argv[1], "child", print, print)
channel.connect(20)
print("ready", flush=True)
sys.stdin.read()
"""
ENGINE_PROGRAM = """
import sys
from keepsight.ipc.handshake import Welcome
from keepsight.ipc.channel import EngineListener
listener = EngineListener(sys.argv[1], Welcome(1), print, print)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_child(endpoint: str) -> Iterator[Callable[[str], "subprocess.Popen[bytes]"]]:
    children: list[subprocess.Popen[bytes]] = []

    def start(program: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", program, endpoint]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


StartChild = Callable[[str], "subprocess.Popen[bytes]"]


class TestKilledProcesses:
    def test_an_engine_notices_a_killed_frontend(self, engine: Engine, start_child: StartChild) -> None:
        start_child(FRONTEND_PROGRAM).kill()
        assert engine.lost.get(timeout=LIMIT) == "child"

    def test_a_frontend_notices_a_killed_engine_and_connects_to_the_next(
        self, endpoint: str, start_child: StartChild, opened: Callable[[Any], Any]
    ) -> None:
        child = start_child(ENGINE_PROGRAM)
        frontend: Frontend = opened(Frontend(endpoint)).connect()
        child.kill()
        assert "ended" in frontend.lost.get(timeout=LIMIT)
        start_child(ENGINE_PROGRAM)
        opened(Frontend(endpoint)).connect()


def test_collecting_a_channel_that_was_never_connected_does_not_block(tmp_path: Path) -> None:
    program = """
import gc, sys
from keepsight.ipc.channel import FrontendChannel
for number in range(20):
    channel = FrontendChannel(sys.argv[1], "a", print, print)
    channel.itself = channel
    del channel
    gc.collect()
"""
    # In a separate process: a garbage collection that blocks cannot be interrupted.
    subprocess.run([sys.executable, "-c", program, f"ipc://{tmp_path}/engine"], check=True, timeout=LIMIT)
