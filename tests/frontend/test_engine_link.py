"""The link over real sockets, to engines that only listen."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

import pytest

from keepsight.errors import HandshakeError
from keepsight.frontend import engine_link
from keepsight.frontend.caller import Send
from keepsight.frontend.engine_client import EngineClient
from keepsight.frontend.engine_link import EngineLink
from keepsight.ipc.channel import EngineListener, FrontendChannel
from keepsight.ipc.handshake import Welcome
from keepsight.requests import FromEngine, MediaHeld, ResetCaches, TokenOutput

SOON = 20  # seconds; normally takes milliseconds


class Client:
    """Records the link's calls, which a test can wait for."""

    def __init__(self) -> None:
        self.heard = SimpleQueue[Any]()
        self.send: Send | None = None
        self.was_connected = threading.Event()
        self.expected: list[bool] = []

    def expect(self, rank: int, *, lives: bool) -> None:
        self.expected.append(lives)

    def connect(self, send: Send, rank: int, *, accepts_unrequested_pixels: bool) -> None:
        self.send = send
        self.heard.put("connected")
        self.was_connected.set()

    def disconnect(self, reason: str, rank: int) -> None:
        self.send = None
        self.heard.put("disconnected")

    def receive(self, outputs: list[FromEngine], rank: int) -> None:
        self.heard.put(outputs)

    def next(self) -> Any:
        return self.heard.get(timeout=SOON)


StartEngine = Callable[[int], EngineListener]


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def welcomes() -> list[int]:
    return []


@pytest.fixture
def link(client: Client, welcomes: list[int]) -> Iterator[EngineLink]:
    link = EngineLink(cast(EngineClient, client), "one", lambda welcome: welcomes.append(welcome.max_model_len))
    yield link
    link.close()


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    started: list[EngineListener] = []

    def start(number: int) -> EngineListener:
        """Start an engine that sends its number in its welcome."""
        engine = EngineListener(f"ipc://{tmp_path}/engine-{number}", Welcome(number), lambda *_: None, lambda _: None)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def first(link: EngineLink, client: Client, start_engine: StartEngine, tmp_path: Path) -> EngineListener:
    """Engine 1, with the client connected to it."""
    engine = start_engine(1)
    link.engine_is_ready(f"ipc://{tmp_path}/engine-1")
    assert client.next() == "connected"
    return engine


def test_the_client_is_connected_once_an_engine_has_welcomed_it(
    first: EngineListener, client: Client, welcomes: list[int]
) -> None:
    assert welcomes == [1]
    assert client.send is not None
    assert client.send(ResetCaches("reset"))
    first.send("one", [TokenOutput("r", 0, 5)])
    assert client.next() == [TokenOutput("r", 0, 5)]


def test_the_client_is_told_whether_an_engine_lives(first: EngineListener, link: EngineLink, client: Client) -> None:
    assert client.expected == [True]
    link.engine_is_lost()
    assert client.expected == [True, False]


def test_a_dying_engine_s_last_message_comes_before_its_disconnect(
    first: EngineListener, link: EngineLink, client: Client
) -> None:
    first.send("one", [TokenOutput("r", 0, 5)])
    assert client.next() == [TokenOutput("r", 0, 5)]
    link.engine_is_lost()
    first.close()
    assert client.next() == "disconnected"


def test_the_next_engine_replaces_the_last(
    link: EngineLink, client: Client, welcomes: list[int], start_engine: StartEngine, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        engine = start_engine(number)
        link.engine_is_ready(f"ipc://{tmp_path}/engine-{number}")
        assert client.next() == "connected"
        engine.close()
        link.engine_is_lost()
        assert client.next() == "disconnected"
    assert welcomes == [1, 2, 3]


def test_an_engine_that_is_replaced_is_disconnected_even_if_it_still_answers(
    link: EngineLink, client: Client, welcomes: list[int], start_engine: StartEngine, tmp_path: Path
) -> None:
    for number in (1, 2):
        start_engine(number)
        link.engine_is_ready(f"ipc://{tmp_path}/engine-{number}")
    heard = [client.next()]
    while welcomes[-1:] != [2] or heard[-1] != "connected":
        heard.append(client.next())
    # The link may have left the first engine before it answered.
    assert heard in (["connected"], ["connected", "disconnected", "connected"], ["disconnected", "connected"])


def test_nothing_of_a_replaced_engine_is_delivered_after_its_disconnect(
    link: EngineLink, client: Client, start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, may_read = threading.Event(), threading.Event()

    def read_slowly(outputs: list[FromEngine], rank: int) -> None:
        is_reading.set()
        assert may_read.wait(SOON)
        client.heard.put(outputs)

    # Set before the link learns of an engine, as it binds this method then.
    monkeypatch.setattr(client, "receive", read_slowly)
    first, _ = start_engine(1), start_engine(2)
    link.engine_is_ready(f"ipc://{tmp_path}/engine-1")
    assert client.next() == "connected"
    first.send("one", [TokenOutput("r", 0, 5)])
    assert is_reading.wait(SOON)
    replacing = threading.Thread(target=link.engine_is_ready, args=[f"ipc://{tmp_path}/engine-2"])
    replacing.start()
    with pytest.raises(Empty):
        client.heard.get(timeout=0.2)
    may_read.set()
    assert [client.next(), client.next(), client.next()] == [[TokenOutput("r", 0, 5)], "disconnected", "connected"]
    replacing.join()


def test_an_engine_that_is_replaced_before_there_is_a_channel_to_it_is_never_connected_to(
    link: EngineLink,
    client: Client,
    welcomes: list[int],
    start_engine: StartEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_channel(endpoint: str, *others: Any) -> FrontendChannel:
        if endpoint.endswith("engine-1"):
            link.engine_is_ready(f"ipc://{tmp_path}/engine-2")
        return FrontendChannel(endpoint, *others)

    monkeypatch.setattr("keepsight.frontend.engine_link.FrontendChannel", open_channel)
    start_engine(1)
    start_engine(2)
    link.engine_is_ready(f"ipc://{tmp_path}/engine-1")
    assert client.next() == "connected"
    assert welcomes == [2]


def test_an_engine_s_first_messages_are_delivered_once_the_client_is_connected(client: Client, tmp_path: Path) -> None:
    held, endpoint = MediaHeld(("0" * 64,)), f"ipc://{tmp_path}/engine-1"

    def report_held() -> None:
        engine.send_to_all([held])

    engine = EngineListener(endpoint, Welcome(99), lambda *_: None, lambda _: None, on_welcomed=report_held)
    # Handling the welcome takes longer than receiving the next message.
    link = EngineLink(cast(EngineClient, client), "one", lambda _: time.sleep(0.1))
    link.engine_is_ready(endpoint)
    assert [client.next(), client.next()] == ["connected", [held]]
    link.close()
    engine.close()


def test_a_link_that_is_welcomed_too_late_connects_and_disconnects(
    client: Client, start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = threading.Event()

    def connect(channel: FrontendChannel, timeout: float) -> Welcome:
        welcome = connect_in_time(channel, timeout)
        if late.is_set():
            return welcome
        assert client.was_connected.wait(SOON)
        late.set()
        channel.close()
        raise HandshakeError("no engine answered")

    connect_in_time = FrontendChannel.connect
    monkeypatch.setattr(FrontendChannel, "connect", connect)
    link = EngineLink(cast(EngineClient, client), "one", lambda _: None)
    start_engine(1)
    link.engine_is_ready(f"ipc://{tmp_path}/engine-1")
    assert [client.next() for _ in range(3)] == ["connected", "disconnected", "connected"]
    link.close()


def test_a_connection_that_breaks_while_its_engine_lives_is_restored(
    first: EngineListener, client: Client, welcomes: list[int]
) -> None:
    first.forget("one")
    assert [client.next(), client.next()] == ["disconnected", "connected"]
    assert welcomes == [1, 1]


def test_a_link_can_be_closed_while_it_waits_for_an_engine_that_is_not_there(tmp_path: Path) -> None:
    link = EngineLink(cast(EngineClient, Client()), "one", lambda welcome: None)
    link.engine_is_ready(f"ipc://{tmp_path}/engine-1")
    link.close()


def test_what_keeps_a_link_from_connecting_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = SimpleQueue[str]()

    def refuse(self: FrontendChannel, timeout: float) -> Welcome:
        attempts.put("one more")
        raise HandshakeError("the frontend speaks another version")

    monkeypatch.setattr(FrontendChannel, "connect", refuse)
    monkeypatch.setattr(engine_link, "RETRY_SECONDS", 0.001)
    link = EngineLink(cast(EngineClient, Client()), "one", lambda welcome: None)
    link.engine_is_ready(f"ipc://{tmp_path}/engine-1")
    for _ in range(3):
        attempts.get(timeout=SOON)
    link.close()
    assert caplog.messages == ["no connection to the engine: the frontend speaks another version"]


def test_without_a_free_thread_the_link_tries_again(
    link: EngineLink,
    client: Client,
    start_engine: StartEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, failures = threading.Thread.start, [1, 2]

    def start_later(thread: threading.Thread) -> None:
        if failures:
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    start_engine(1)
    monkeypatch.setattr(threading.Thread, "start", start_later)
    link.engine_is_ready(f"ipc://{tmp_path}/engine-1")
    assert client.next() == "connected"
    assert not failures


def test_without_a_free_descriptor_the_link_tries_again(
    link: EngineLink,
    client: Client,
    start_engine: StartEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect, failures = FrontendChannel.connect, [0, 1]

    def make(*arguments: Any) -> FrontendChannel:
        if len(failures) > 1:
            raise OSError(failures.pop(), "Too many open files")
        return FrontendChannel(*arguments)

    def connect_later(channel: FrontendChannel, timeout: float) -> Welcome:
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return connect(channel, timeout)

    monkeypatch.setattr(engine_link, "FrontendChannel", make)
    monkeypatch.setattr(FrontendChannel, "connect", connect_later)
    start_engine(1)
    link.engine_is_ready(f"ipc://{tmp_path}/engine-1")
    assert client.next() == "connected"
    assert not failures
