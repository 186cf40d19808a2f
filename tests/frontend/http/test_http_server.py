"""The server over real sockets, with a fake engine."""

import asyncio
import hashlib
import itertools
import json
import logging
import random
import re
import select
import socket
import ssl
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepsight import certificate
from keepsight.api_settings import ApiSettings
from keepsight.frontend.api.app import create_app
from keepsight.frontend.http import fair_accept, http_server, lookout, slow_client_limits
from keepsight.frontend.http.direct_body_protocol import MAX_HEADERS, MAX_PIPELINED, PIECE_BYTES
from keepsight.frontend.http.fair_accept import FairAcceptServer
from keepsight.frontend.http.http_server import make_server
from keepsight.frontend.http.lookout import MAX_WAITING_BYTES
from keepsight.frontend.http.read_body import reading_body
from keepsight.frontend.http.slow_client_limits import MAX_HEADER_BYTES
from keepsight.frontend.http.tcp_info import count_unacknowledged, has_left
from keepsight.frontend.http.waiting_room import WaitingRoom
from tests.frontend.api.app_client import MODEL, FakeEngine
from tests.server_in_thread import running_in_thread

PEM = Path(__file__).parents[1] / "pictures_test.pem"
EXPIRED = PEM.with_name("expired_test.pem")
PATIENCE = 20  # seconds
SLOW = {"slow_client_seconds": 0.3}  # for tests of clients that are too slow


@contextmanager
def serving(engine: FakeEngine, **settings: Any) -> Iterator[int]:
    """Run a server; yield its port."""
    api = ApiSettings(**{"slow_client_seconds": PATIENCE} | settings)
    with running(create_app(engine.preparer, engine, MODEL, api), api) as port:
        yield port


@contextmanager
def running(app: ASGIApp, api: ApiSettings, on_refused: Callable[[], object] = bool) -> Iterator[int]:
    with run(make_server(app, api, on_refused)) as port:
        yield port


@contextmanager
def run(server: FairAcceptServer) -> Iterator[int]:
    with running_in_thread(server, PATIENCE) as port:
        yield port


@contextmanager
def connected(port: int, sent: bytes) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", port))
        connection.sendall(sent)
        yield connection


def read_to_end(connection: socket.socket) -> bytes:
    read = b""
    try:
        while chunk := connection.recv(65536):
            read += chunk
    except ConnectionResetError:
        pass
    return read


def read_json_answer(connection: socket.socket) -> bytes:
    """Read up to the end of a body that is an object: it may come after the headers."""
    received = b""
    while not received.endswith(b"}") and (part := connection.recv(65536)):
        received += part
    return received


def ask(path: str, body: bytes, length: int | None = None) -> bytes:
    return (
        b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % (path.encode(), length or len(body))
        + body
    )


VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = VERSION.replace(b"Host", b"Connection: close\r\nHost")
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"GET /hea"])
def test_a_client_that_does_not_finish_its_request_is_disconnected(engine: FakeEngine, sent: bytes) -> None:
    with serving(engine, **SLOW) as port, connected(port, sent) as connection:
        assert read_to_end(connection) == b""


def test_an_unfinished_second_request_is_disconnected_like_an_idle_connection(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 1)
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(engine, **SLOW) as port, connected(port, request + request[:-2]) as connection:
        assert read_to_end(connection).count(b"HTTP/1.1 200") == 1


def test_a_connection_may_be_idle_for_longer_than_clients_keep_theirs(engine: FakeEngine) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(engine, **SLOW) as port, connected(port, request) as connection:
        assert read_json_answer(connection).startswith(b"HTTP/1.1 200")
        time.sleep(5.5)  # longer than httpx keeps an idle connection, or uvicorn by default: a race
        connection.sendall(request)
        assert read_json_answer(connection).startswith(b"HTTP/1.1 200")


def test_headers_without_end_are_refused(engine: FakeEngine) -> None:
    long = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (MAX_HEADER_BYTES + 1)
    with serving(engine) as port, connected(port, long) as connection:
        status = read_to_end(connection).split(b"\r\n")[0]
        assert status.split()[1] in (b"431", b"400")


@pytest.mark.parametrize(
    ("asked", "status"),
    [(b"no request\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (MAX_HEADERS + 1) + b"\r\n", b"431")],
)
def test_an_answer_to_what_is_no_request_has_an_id_of_its_own(engine: FakeEngine, asked: bytes, status: bytes) -> None:
    answers = []
    with serving(engine) as port:
        for _ in range(2):
            with connected(port, asked) as connection:
                answers.append(read_to_end(connection))
    ids = [re.findall(rb"\r\nx-request-id: ([0-9a-f]{32})\r\n", each) for each in answers]
    assert [each.split()[1] for each in answers] == [status] * 2
    assert [len(each) for each in ids] == [1, 1]
    assert ids[0] != ids[1]


def test_what_is_no_request_is_not_logged(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(engine) as port, connected(port, b"\x16\x03\x01\x02\x00") as connection:
        assert b" 400 " in read_to_end(connection)
    assert "Invalid HTTP request" not in caplog.text


def test_a_body_that_does_not_come_times_out(engine: FakeEngine) -> None:
    with serving(engine, **SLOW) as port, connected(port, ask("/tokenize", b"{", 10)) as connection:
        assert b" 408 " in read_to_end(connection).split(b"\r\n")[0]


def test_a_client_that_does_not_read_is_disconnected_and_its_request_ends(engine: FakeEngine) -> None:
    engine.is_endless = True
    has_ended = threading.Event()
    engine.on_abandoned = has_ended.set
    with serving(engine, **SLOW) as port, connected(port, ask("/v1/chat/completions", ENDLESS)):
        assert has_ended.wait(PATIENCE)


TLS: dict[str, Any] = {"ssl_certfile": str(PEM)}
SCHEMES: list[dict[str, Any]] = [{}, TLS]


def over(settings: dict[str, Any], connection: socket.socket) -> socket.socket:
    return ssl._create_unverified_context().wrap_socket(connection) if settings else connection


async def tell_much(_scope: Scope, _receive: Receive, send: Send) -> None:
    body = b"x" * 8_000_000 + b"end"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def tell_some(_scope: Scope, _receive: Receive, send: Send) -> None:
    """An app whose answers are shorter than what makes a server pause its writing."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"30000")]})
    await send({"type": "http.response.body", "body": b"x" * 30_000})


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("settings", SCHEMES, ids=["plain", "tls"])
@pytest.mark.parametrize("last", [VERSION, LAST], ids=["keep-alive", "close"])
def test_a_client_that_leaves_the_end_of_its_last_answer_unread_is_disconnected(
    loop: str, settings: dict[str, Any], last: bytes
) -> None:
    server = make_server(tell_some, ApiSettings(slow_client_seconds=1, **settings))
    server.config.loop = loop
    state = server.server_state
    with run(server) as port, connected(port, b"") as connection:
        client = over(settings, connection)
        fill_kernel(server, client)
        client.sendall(last)
        await_true(lambda: not state.connections)


@pytest.mark.parametrize("settings", SCHEMES, ids=["plain", "tls"])
@pytest.mark.parametrize("implementation", [AutoHTTPProtocol, H11Protocol])
@pytest.mark.parametrize("ends_first", [False, True])
def test_a_client_that_does_not_read_an_answer_that_failed_is_disconnected(
    settings: dict[str, Any], implementation: Any, ends_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", implementation)

    async def fail_at_last(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/version":
            await tell_some(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
        while ends_first and not all(each.transport.is_closing() for each in server.server_state.connections):
            await asyncio.sleep(0.001)
        raise ValueError

    server = make_server(fail_at_last, ApiSettings(slow_client_seconds=1, **settings))
    with run(server) as port, connected(port, b"") as connection:
        client = over(settings, connection)
        fill_kernel(server, client)
        client.sendall(VERSION.replace(b"/version", b"/fail"))
        if ends_first:
            socket.socket.shutdown(client, socket.SHUT_WR)
        await_true(lambda: not server.server_state.connections)


@pytest.mark.parametrize("implementation", [AutoHTTPProtocol, H11Protocol])
def test_a_client_that_reads_a_little_of_an_answer_that_failed_is_disconnected(
    implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", implementation)

    async def fail(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 200_000, "more_body": True})
        raise ValueError

    server = make_server(fail, ApiSettings(slow_client_seconds=1))
    server.config.loop = "asyncio"  # uvloop resumes writing only once all is written
    with run(server) as port, connected(port, b"") as client:
        protocol = shrink_kernel(server)
        client.sendall(VERSION)
        await_true(protocol.transport.is_closing)
        while protocol.flow.write_paused:
            client.recv(2048)
        await_true(lambda: not server.server_state.connections)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_ends_tls_within_an_answer_and_reads_no_more_is_disconnected(loop: str) -> None:
    has_begun, was_told = threading.Event(), threading.Event()

    async def tell_on(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        # More than the kernel takes, and less than pauses the writing.
        await send({"type": "http.response.body", "body": b"x" * 300_000, "more_body": True})
        await receive()
        leaving = asyncio.ensure_future(receive())
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            has_begun.set()
            await asyncio.sleep(0.01)
        was_told.set()

    server = make_server(tell_on, ApiSettings(slow_client_seconds=2, **TLS))
    server.config.loop = loop
    with run(server) as port, connected(port, b"") as connection:
        client = ssl._create_unverified_context().wrap_socket(connection)
        shrink_kernel(server)
        client.sendall(VERSION)
        assert has_begun.wait(PATIENCE)
        client.setblocking(False)
        with suppress(ssl.SSLError):  # it waits for no answer
            client.unwrap()
        assert was_told.wait(PATIENCE)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("settings", SCHEMES, ids=["plain", "tls"])
@pytest.mark.parametrize("reason", ["close", "idle", "shutdown", "close and shutdown"])
def test_a_connection_that_ends_lets_its_client_read_the_last_answer_first(
    loop: str, settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_client_limits, "SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.1 if reason == "idle" else PATIENCE)
    server = make_server(tell_much, ApiSettings(**settings))
    server.config.loop = loop
    with run(server) as port, connected(port, b"") as connection:
        client = over(settings, connection)
        client.sendall(LAST if "close" in reason else VERSION)
        assert client.recv(1)
        server.should_exit = "shutdown" in reason
        await_true(lambda: all(each.transport.is_closing() for each in tuple(server.server_state.connections)))
        time.sleep(1.5)  # longer than a client has to end TLS once it has read everything
        assert read_to_end(client).endswith(b"x" * 1000 + b"end")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_tls_connection_closed_while_the_kernel_is_empty_sends_what_the_transport_holds(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the event loop is too busy to refill what the client has drained."""
    monkeypatch.setattr(slow_client_limits, "SECONDS_BETWEEN_LOOKS", 0.05)

    async def keep_busy(_scope: Scope, _receive: Receive, send: Send) -> None:
        [protocol] = server.server_state.connections
        connection = protocol.transport.get_extra_info("socket")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 50_000, "more_body": True})
        if loop == "uvloop":  # it writes at the end of an iteration
            await asyncio.sleep(0)
        await_true(lambda: not count_unacknowledged(connection))
        await send({"type": "http.response.body", "body": b"end"})

    server = make_server(keep_busy, ApiSettings(**TLS))
    server.config.loop = loop
    with run(server) as port, connected(port, b"") as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)  # more than the server's kernel takes
        client = over(TLS, connection)
        shrink_kernel(server)
        client.sendall(LAST)
        time.sleep(0.5)  # some looks
        assert read_to_end(client).endswith(b"end\r\n0\r\n\r\n")


def fill_kernel(server: FairAcceptServer, client: socket.socket) -> None:
    """Ask until the kernel takes no more: little enough then waits in the server that writing is not paused."""
    state, num_sent = server.server_state, 0
    while not has_unsent_bytes(server):
        client.sendall(VERSION)
        num_sent += 1
        while state.total_requests < num_sent:
            time.sleep(0.001)


def shrink_kernel(server: FairAcceptServer) -> Any:
    """Let the kernel take little of what the server writes to its only client; return the connection's protocol."""
    await_true(lambda: server.server_state.connections)
    [protocol] = server.server_state.connections
    protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return protocol


def has_unsent_bytes(server: FairAcceptServer) -> bool:
    """Return whether answers wait in the server for longer than an iteration of its event loop."""
    for _ in range(2):
        transports = [each.transport for each in tuple(server.server_state.connections)]
        is_unsent = transports and all(each.get_write_buffer_size() for each in transports)
        # TLS's transport does not tell what the one below it holds.
        if not is_unsent or select.select([], [each.get_extra_info("socket") for each in transports], [], 0)[1]:
            return False
        time.sleep(0.05)
    return True


def await_true(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_client_that_reads_slowly_is_not_disconnected() -> None:
    async def tell_much(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 8_000_000})

    # Shorter than the reading takes, and longer than a busy machine stands still.
    with running(tell_much, ApiSettings(slow_client_seconds=1.5)) as port, connected(port, LAST) as connection:
        for _ in range(20):
            time.sleep(0.1)
            assert connection.recv(4096)
        assert len(read_to_end(connection)) > 7_900_000


@pytest.mark.parametrize("asks_for_more", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(engine: FakeEngine, stream: bool, asks_for_more: bool) -> None:
    engine.is_endless = True
    has_begun, has_ended = threading.Event(), threading.Event()
    engine.on_begun, engine.on_abandoned = has_begun.set, has_ended.set
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "stream": stream}).encode()
    sent = ask("/v1/chat/completions", body)
    if asks_for_more:
        sent = sent.replace(b"Connection: close\r\n", b"") + VERSION
    with serving(engine, slow_client_seconds=2 * PATIENCE) as port:
        with connected(port, sent):
            assert has_begun.wait(PATIENCE)
        assert has_ended.wait(PATIENCE)


@pytest.mark.parametrize("implementation", [AutoHTTPProtocol, H11Protocol])
def test_a_connection_that_its_client_resets_leaves_no_timer(
    implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", implementation)
    server = make_server(tell_some, ApiSettings())
    with run(server) as port, connected(port, VERSION) as connection:
        assert connection.recv(1)
        [protocol] = server.server_state.connections
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        await_true(lambda: not server.server_state.connections)
        await_true(lambda: protocol.timeout_keep_alive_task is None)  # type: ignore[union-attr]


@pytest.mark.parametrize("settings", [{}, {"ssl_certfile": str(PEM)}], ids=["plain", "tls"])
@pytest.mark.parametrize("ends_first", [False, True], ids=["reset", "end"])
def test_writes_to_a_client_that_left_are_not_logged_one_by_one(
    settings: dict[str, Any], ends_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell_in_bursts(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        leaving = asyncio.ensure_future(receive())
        while not leaving.done():
            for _ in range(20):  # asyncio does not log the first five failed writes
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0)

    with running(tell_in_bursts, ApiSettings(**settings)) as port, connected(port, b"") as connection:
        client = ssl._create_unverified_context().wrap_socket(connection) if settings else connection
        client.sendall(LAST)
        assert client.recv(1000)
        if ends_first:
            socket.socket.shutdown(client, socket.SHUT_WR)
            read_to_end(client)
        client.close()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_body_that_is_too_large_is_answered_even_while_it_is_sent(engine: FakeEngine) -> None:
    with serving(engine, max_body_bytes=1000) as port:
        response = httpx.post(f"http://127.0.0.1:{port}/tokenize", content=b"a" * 5_000_000, timeout=PATIENCE)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("settings", [{}, {"ssl_certfile": str(PEM)}], ids=["plain", "tls"])
def test_a_refusal_reaches_a_client_that_sends_all_before_it_reads_and_closes(
    engine: FakeEngine, settings: dict[str, Any]
) -> None:
    with serving(engine, api_keys=("one",), **settings) as port:
        asked = f"http{'s' if settings else ''}://127.0.0.1:{port}/tokenize", b"a" * 10_000_000
        with pytest.raises(urllib.error.HTTPError) as refused:  # urllib always asks to close
            urllib.request.urlopen(*asked, timeout=PATIENCE, context=ssl._create_unverified_context())
        assert refused.value.code == 401
        assert b"invalid_request_error" in refused.value.read()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_refusal_behind_an_answer_to_a_client_that_has_just_left_is_no_fault(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def end_once_it_left(_scope: Scope, _receive: Receive, send: Send) -> None:
        [protocol] = server.server_state.connections
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"end", "more_body": True})
        if loop == "uvloop":  # it writes at the end of an iteration
            await asyncio.sleep(0)
        await_true(lambda: has_left(protocol.transport.get_extra_info("socket")))
        await send({"type": "http.response.body"})

    server = make_server(end_once_it_left, ApiSettings())
    server.config.loop = loop
    with run(server) as port:
        with connected(port, VERSION + b"no request\r\n\r\n") as connection:
            answer = b""
            while not answer.endswith(b"end"):
                answer += connection.recv(65536)
        await_true(lambda: not server.server_state.connections)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def send_without_end(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"a" * 1000)
        time.sleep(0.01)


def test_a_client_that_sends_on_after_its_last_answer_is_disconnected_at_last(engine: FakeEngine) -> None:
    sent = ask("/nothing", b"a" * 1000, length=2**30)
    with serving(engine, **SLOW) as port, connected(port, sent) as connection:
        assert b" 404 " in read_to_end(connection)
        with pytest.raises(ConnectionError):
            send_without_end(connection)


def test_expect_100_continue_is_answered(engine: FakeEngine) -> None:
    with serving(engine, max_body_bytes=1000) as port:
        for length, status in ((10, b"100"), (5000, b"413")):
            asked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % length
            with connected(port, asked) as connection:
                assert connection.recv(65536).split()[1] == status


def test_an_invalid_chunk_of_a_client_that_expects_100_continue_is_no_fault_of_the_server(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    headers = b"Host: x\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n"
    with (
        serving(engine) as port,
        connected(port, b"POST /tokenize HTTP/1.1\r\n" + headers + b"\r\nzz\r\n") as connection,
    ):
        assert read_to_end(connection).split()[1] == b"400"
    assert "Traceback" not in caplog.text


def test_the_reader_of_a_large_body_is_woken_once() -> None:
    heard: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> Message:
            heard.append(await receive())
            return heard[-1]

        async with reading_body(Request(scope, listen), WaitingRoom(1, 2**30), 2**30, PATIENCE) as body:
            await Response(str(len(body)))(scope, receive, send)

    with running(app, ApiSettings()) as port, connected(port, ask("/", b"x" * 5_000_000)) as connection:
        assert read_to_end(connection).endswith(b"5000000")
    assert len(heard) == 1


async def tell_body(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that answers with a digest of the request's body."""
    async with reading_body(Request(scope, receive), WaitingRoom(4, 2**26), 2**26, PATIENCE) as body:
        await Response(hashlib.sha256(body).hexdigest())(scope, receive, send)


def test_large_bodies_come_whole_and_in_their_order_on_one_connection() -> None:
    bodies = [random.Random(number).randbytes(size) for number, size in enumerate((3_000_000, 10, 1_500_001, 700_000))]
    with running(tell_body, ApiSettings()) as port, httpx.Client(timeout=PATIENCE) as client:
        for body in bodies:
            assert client.post(f"http://127.0.0.1:{port}/", content=body).text == hashlib.sha256(body).hexdigest()


def test_a_large_body_that_looks_like_many_heads_gives_back_all_its_room() -> None:
    room, body = WaitingRoom(4, 2**26), b"a line\r\n\r\n" * 200_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with reading_body(Request(scope, receive), room, 2**26, PATIENCE) as read:
            await Response(hashlib.sha256(read).hexdigest())(scope, receive, send)

    with running(app, ApiSettings()) as port, httpx.Client(timeout=PATIENCE) as client:
        assert client.post(f"http://127.0.0.1:{port}/", content=body).text == hashlib.sha256(body).hexdigest()
    assert room.num_bytes == 0


def test_requests_behind_a_large_body_are_not_taken_for_its_end() -> None:
    bodies = [b"a" * 1_000_000, b"b" * 2_000_000, b"c"]
    sent = b"".join(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(each) + each for each in bodies)
    with running(tell_body, ApiSettings()) as port, connected(port, sent + ask("/", b"last")) as connection:
        answers = read_to_end(connection)
    assert all(hashlib.sha256(each).hexdigest().encode() in answers for each in (*bodies, b"last"))


def test_a_large_chunked_body_is_read_too() -> None:
    pieces = [b"x" * 300_000] * 5
    with running(tell_body, ApiSettings()) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/", content=iter(pieces), timeout=PATIENCE).text
    assert answer == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_a_stalled_large_body_times_out_and_its_rest_is_no_request(engine: FakeEngine) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n"
    with serving(engine, **SLOW) as port, connected(port, head + b" " * 1_000_000) as connection:
        assert connection.recv(65536).split()[1] == b"408"
        connection.sendall(b" " * 1_000_000 + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = read_to_end(connection)
    assert answers.count(b"HTTP/1.1") == answers.count(b"HTTP/1.1 200") == 1


def test_a_client_that_leaves_in_the_middle_of_a_large_body_is_noticed() -> None:
    has_left = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await tell_body(scope, receive, send)
        except ClientDisconnect:
            has_left.set()

    with running(app, ApiSettings()) as port:
        with connected(port, ask("/", b"x" * 1_000_000, length=2_000_000)):
            pass
        assert has_left.wait(PATIENCE)


@pytest.mark.parametrize(
    "endless", [b"0\r\n" + b"a: b\r\n" * 60_000, b"0\r\na: " + b"b" * 400_000, b"1;" + b"a" * 400_000]
)
def test_endless_trailers_and_chunk_headers_are_refused(engine: FakeEngine, endless: bytes) -> None:
    with serving(engine) as port, connected(port, CHUNKED) as connection:
        with suppress(ConnectionError):
            connection.sendall(endless)
        assert read_to_end(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("is_one_too_many", [False, True])
def test_too_many_headers_are_refused(engine: FakeEngine, is_one_too_many: bool) -> None:
    headers = LAST[:-2] + b"a:\r\n" * (MAX_HEADERS - 2 + is_one_too_many) + b"\r\n"
    with serving(engine) as port, connected(port, headers) as connection:
        statuses = re.findall(rb"HTTP/1.1 (\d+)", read_to_end(connection))
    assert statuses == [b"431" if is_one_too_many else b"200"]


@pytest.mark.parametrize("header", [b"X: " + b"a" * 2000 + b"\r\n", b"X: " + b"a" * 300 + b"\r\n"])
@pytest.mark.parametrize("is_too_long", [False, True])
def test_headers_that_become_too_long_with_their_last_piece_are_refused(
    engine: FakeEngine, header: bytes, is_too_long: bool
) -> None:
    # These are sent first, and are not too long on their own.
    headers = LAST[:-2] + header * ((MAX_HEADER_BYTES - len(LAST)) // len(header))
    with serving(engine) as port, connected(port, headers) as connection:
        connection.sendall(header * is_too_long * 9 + b"\r\n")
        statuses = re.findall(rb"HTTP/1.1 (\d+)", read_to_end(connection))
    assert statuses == [b"431" if is_too_long else b"200"]


def test_trailers_are_not_headers_of_the_request() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with reading_body(Request(scope, receive), WaitingRoom(1, 2**20), 2**20, PATIENCE):
            await Response(str([name for name, _ in scope["headers"]]))(scope, receive, send)

    sent = CHUNKED + b"0\r\nAuthorization: Bearer one\r\n\r\n"
    with running(app, ApiSettings()) as port, connected(port, sent + LAST) as connection:
        assert b"authorization" not in read_to_end(connection)


@pytest.mark.parametrize("num_requests", [10, MAX_PIPELINED + 8, 5000])
def test_pipelined_requests_are_all_answered(engine: FakeEngine, num_requests: int) -> None:
    with serving(engine) as port, connected(port, VERSION * num_requests + LAST) as connection:
        assert read_to_end(connection).count(b"HTTP/1.1 200") == num_requests + 1


def test_few_pipelined_requests_wait_in_the_server() -> None:
    may_answer, most = threading.Event(), 0

    async def answer_late(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal most
        await asyncio.to_thread(may_answer.wait, PATIENCE)
        [connection] = server.server_state.connections
        most = max(most, len(connection.pipeline))  # type: ignore[union-attr]
        await Response()(scope, receive, send)

    server = make_server(answer_late, ApiSettings())
    with run(server) as port, connected(port, VERSION * 5000 + LAST) as connection:
        may_answer.set()
        assert read_to_end(connection).count(b"HTTP/1.1 200") == 5001
    assert 0 < most <= MAX_PIPELINED + PIECE_BYTES // len(VERSION) + 1


@pytest.mark.parametrize(
    "invalid",
    [b"no request\r\n\r\n", VERSION[:-2] + b"a:\r\n" * MAX_HEADERS + b"\r\n", CHUNKED + b"xyz\r\n"],
    ids=["garbage", "headers", "body"],
)
def test_what_is_invalid_is_refused_behind_the_answers_to_the_requests_before_it(
    engine: FakeEngine, invalid: bytes
) -> None:
    with serving(engine) as port, connected(port, VERSION * 2 + invalid * 2) as connection:
        statuses = re.findall(rb"HTTP/1.1 (\d+)", read_to_end(connection))
    assert statuses == [b"200", b"200", b"431" if len(invalid) > 500 else b"400"]


@pytest.mark.parametrize("implementation", [AutoHTTPProtocol, H11Protocol])
def test_a_client_that_leaves_while_its_next_request_waits_is_noticed(
    engine: FakeEngine, implementation: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", implementation)
    engine.is_endless = True
    has_begun, has_ended = threading.Event(), threading.Event()
    engine.on_begun, engine.on_abandoned = has_begun.set, has_ended.set
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
    sent = ask("/v1/chat/completions", body).replace(b"Connection: close\r\n", b"")
    with serving(engine, slow_client_seconds=2 * PATIENCE) as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(sent)
            assert has_begun.wait(PATIENCE)
            connection.sendall(ask("/tokenize", b" " * 300_000, 2_000_000))
        assert has_ended.wait(PATIENCE)


@pytest.mark.parametrize("implementation", [AutoHTTPProtocol, H11Protocol])
def test_a_client_that_leaves_while_its_third_request_waits_for_the_second_is_noticed(
    implementation: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", implementation)
    monkeypatch.setattr(lookout, "SECONDS_BETWEEN_LOOKOUTS", 0.01)
    second_has_begun, was_noticed = threading.Event(), threading.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        [protocol] = server.server_state.connections
        if scope["path"] == "/version":
            await receive()
            leaving = asyncio.ensure_future(receive())  # reads on, so there is no lookout any more
            while protocol._next_look is not None:  # type: ignore[union-attr]
                await asyncio.sleep(0.001)
            leaving.cancel()
            await tell_some(scope, receive, send)
            return
        second_has_begun.set()
        while server.server_state.connections and not server.should_exit:
            await asyncio.sleep(0.001)
        if not server.server_state.connections:
            was_noticed.set()

    server = make_server(answer, ApiSettings())
    with run(server) as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(VERSION + VERSION.replace(b"/version", b"/second") + VERSION)
            assert second_has_begun.wait(PATIENCE)
            num_read = 0
            while num_read < 30_000:  # unread, it would reset the connection
                num_read += len(connection.recv(65536))
        assert was_noticed.wait(PATIENCE)


@pytest.mark.parametrize(
    ("implementation", "first"),
    [(AutoHTTPProtocol, VERSION), (H11Protocol, VERSION), (H11Protocol, LAST)],  # httptools drops what is behind `LAST`
    ids=["httptools", "h11", "h11, close"],
)
def test_little_is_held_of_what_a_client_sends_behind_the_request_being_answered(
    implementation: type, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", implementation)
    monkeypatch.setattr(lookout, "SECONDS_BETWEEN_LOOKOUTS", 0.001)
    num_looks, has_begun = 0, threading.Event()

    def look(_: object) -> bool:
        nonlocal num_looks
        num_looks += 1
        return False

    async def answer_at_last(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun.set()
        while not server.should_exit:
            await asyncio.sleep(0.01)
        await tell_some(scope, receive, send)

    def send_more() -> int:
        """Return how much the server holds."""
        with suppress(BlockingIOError):
            connection.send(bytes(200_000))
        return len(protocol.cycle.body) + len(protocol.conn.trailing_data[0] if implementation is H11Protocol else b"")

    monkeypatch.setattr(lookout, "has_left", look)
    server = make_server(answer_at_last, ApiSettings())
    with run(server) as port, connected(port, first) as connection:
        assert has_begun.wait(PATIENCE)
        [protocol] = cast(list[Any], server.server_state.connections)
        connection.sendall(ask("/behind", b"", length=20_000_000))
        connection.setblocking(False)
        await_true(lambda: send_more() >= MAX_WAITING_BYTES)
        last_look = num_looks + 100
        await_true(lambda: send_more() >= 2 * MAX_WAITING_BYTES or num_looks > last_look)
        assert send_more() < 2 * MAX_WAITING_BYTES


@pytest.mark.parametrize("implementation", [AutoHTTPProtocol, H11Protocol])
@pytest.mark.parametrize("behind", [b"\r\n", VERSION], ids=["empty line", "request"])
def test_what_comes_behind_the_last_request_does_not_spoil_its_answer(
    behind: bytes, implementation: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", implementation)
    has_begun, was_sent = threading.Event(), threading.Event()

    async def answer_once_it_came(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun.set()
        await asyncio.to_thread(was_sent.wait, PATIENCE)
        connection = protocol.transport.get_extra_info("socket")
        while select.select([connection], [], [], 0)[0]:
            await asyncio.sleep(0.001)
        await tell_some(scope, receive, send)

    server = make_server(answer_once_it_came, ApiSettings())
    with run(server) as port, connected(port, LAST) as connection:
        assert has_begun.wait(PATIENCE)
        [protocol] = cast(list[Any], server.server_state.connections)
        connection.sendall(behind)
        was_sent.set()
        head, _, content = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert content == b"x" * 30_000


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_client_that_offers_to_upgrade_is_answered_in_http_1_1(size: int) -> None:
    # As Java's HttpClient and `curl --http2` do.
    body = random.Random(0).randbytes(size)
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    sent = ask("/", body).replace(b"Connection: close\r\n", wish) + ask("/", b"last")
    for cut in (0, 60, len(sent) - size // 2):
        with running(tell_body, ApiSettings()) as port, connected(port, sent[:cut]) as connection:
            connection.sendall(sent[cut:])
            answer = read_to_end(connection)
        assert [hashlib.sha256(each).hexdigest().encode() in answer for each in (body, b"last")] == [True, True]


def test_an_invalid_request_gets_an_openai_error_and_is_counted() -> None:
    for sent in (b"hello\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n", VERSION[:-2] + b"Content-Length: -1\r\n\r\n"):
        refused = itertools.count()
        with running(tell_body, ApiSettings(), partial(next, refused)) as port, connected(port, sent) as connection:
            head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
        assert head.split()[1] == b"400"
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert next(refused) == 1


@pytest.mark.parametrize("behind", [b"", VERSION])
def test_the_h11_implementation_behaves_the_same(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", H11Protocol)
    large = json.dumps({"prompt": "Hello"}).encode() + b" " * 1_000_000
    wish = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    sent = [ask("/tokenize", each).replace(b"Connection: close\r\n", wish) for each in (large, b"{}")]
    with serving(engine) as port, connected(port, b"".join(sent) + behind + LAST) as connection:
        statuses = re.findall(rb"HTTP/1.1 (\d+)", read_to_end(connection))
    assert statuses == [b"200", b"400", *[b"200"] * bool(behind), b"200"]


def test_with_h11_no_answer_follows_a_refusal_that_waits_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", H11Protocol)
    server = make_server(tell_some, ApiSettings())
    with run(server) as port, connected(port, b"") as connection:
        fill_kernel(server, connection)
        connection.sendall(CHUNKED + b"xyz\r\n")
        statuses = re.findall(rb"HTTP/1.1 (\d+)", read_to_end(connection))
    assert statuses == [*[b"200"] * (len(statuses) - 1), b"400"]


def test_with_h11_no_refusal_stands_within_an_answer_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", H11Protocol)

    async def begin(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    with running(begin, ApiSettings()) as port, connected(port, CHUNKED) as connection:
        answer = b""
        while b"begun" not in answer:
            answer += connection.recv(65536)
        connection.sendall(b"xyz\r\n")
        answer += read_to_end(connection)
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("implementation", [AutoHTTPProtocol, H11Protocol])
def test_an_http_1_0_stream_ends_with_the_connection(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, implementation: Any
) -> None:
    # nginx speaks HTTP/1.0 to its upstreams by default.
    monkeypatch.setattr(http_server, "AutoHTTPProtocol", implementation)
    cases = {"/v1/chat/completions": ENDLESS, "/tokenize": b'{"prompt": "Hello"}', "/none": b"{}"}
    with serving(engine) as port:
        for path, body in cases.items():
            with connected(port, ask(path, body).replace(b"HTTP/1.1", b"HTTP/1.0")) as connection:
                head, _, content = read_to_end(connection).partition(b"\r\n\r\n")
            is_stream = body == ENDLESS
            assert b"transfer-encoding" not in head
            assert (b"content-length: %d" % len(content) in head) != is_stream
            assert content.startswith(b"data: {") == content.endswith(b"data: [DONE]\n\n") == is_stream


def test_head_is_get_without_a_body(engine: FakeEngine) -> None:
    with serving(engine) as port:
        response = httpx.head(f"http://127.0.0.1:{port}/health", timeout=PATIENCE)
        assert (response.status_code, response.content) == (200, b"")


def test_a_path_prefix_removed_by_a_proxy_leaves_paths_protected(engine: FakeEngine) -> None:
    with (
        serving(engine, root_path="/keepsight", api_keys=("one",)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
    ):
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer one"}).status_code == 200


def test_monitoring_through_a_proxy_is_not_logged(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "keepsight.frontend.api.request_log")
    with serving(engine, root_path="/keepsight") as port:
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            httpx.get(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE)
    [line] = [record.getMessage() for record in caplog.records if record.name == "keepsight.frontend.api.request_log"]
    assert line.startswith("GET /keepsight/v1/models 200")


def test_https_is_spoken_with_a_certificate(engine: FakeEngine) -> None:
    with serving(engine, ssl_certfile=str(PEM)) as port:
        context = ssl.create_default_context(cafile=str(PEM))
        context.check_hostname = False
        with httpx.Client(verify=context, timeout=PATIENCE) as client:
            assert client.get(f"https://127.0.0.1:{port}/ready").json() == {"status": "ok"}


def test_a_renewed_certificate_is_given_to_the_next_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "SECONDS_BETWEEN_LOOKS", 0)
    live = tmp_path / "live.pem"
    live.write_bytes(PEM.read_bytes())
    with running(tell_body, ApiSettings(ssl_certfile=str(live))) as port:
        assert ssl.get_server_certificate(("127.0.0.1", port)) in PEM.read_text()
        (tmp_path / "new.pem").write_bytes(EXPIRED.read_bytes())
        (tmp_path / "new.pem").rename(live)
        assert ssl.get_server_certificate(("127.0.0.1", port)) in EXPIRED.read_text()


def test_a_server_started_while_its_certificate_is_renewed_accepts_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in place of a lost one: a client waits in line."""
    monkeypatch.setattr(certificate, "SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setattr(fair_accept, "RETRY_SECONDS", 0.01)
    live = tmp_path / "live.pem"
    server = make_server(tell_body, ApiSettings(ssl_certfile=str(live)))
    with run(server) as port:
        await_true(lambda: server.started)
        assert not server._acceptors
        live.write_bytes(PEM.read_bytes())
        assert ssl.get_server_certificate(("127.0.0.1", port)) in PEM.read_text()


def test_a_server_that_waits_for_its_certificate_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_accept, "RETRY_SECONDS", 0.01)
    server, accepting = make_server(tell_body, ApiSettings(ssl_certfile=str(tmp_path / "missing"))), list[int]()
    server.on_accepting = partial(accepting.append, 1)
    with run(server):
        await_true(lambda: server.started)
    assert not accepting


def test_shutdown_does_not_wait_for_an_idle_client_to_close_tls() -> None:
    context = ssl._create_unverified_context()
    with socket.socket() as connection:
        with running(tell_body, ApiSettings(ssl_certfile=str(PEM))) as port:
            connection.settimeout(PATIENCE)
            connection.connect(("127.0.0.1", port))
            client = context.wrap_socket(connection)
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        # The server has ended by now, sooner than asyncio's own timeout for closing.
        client.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_shutdown_does_not_wait_for_a_client_that_vanished_once_it_had_read_everything(
    loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = make_server(tell_some, ApiSettings(slow_client_seconds=2 * PATIENCE, **TLS))
    server.config.loop = loop
    connections = server.server_state.connections

    def count_end_of_tls(_: object) -> int:
        return 24 if any(each.transport.is_closing() for each in connections) else 0

    monkeypatch.setattr(slow_client_limits, "count_unacknowledged", count_end_of_tls)
    monkeypatch.setattr(slow_client_limits, "count_acknowledged", lambda _: 30_000)
    with run(server) as port, connected(port, b"") as connection:
        client = over(TLS, connection)
        client.sendall(VERSION)
        num_read = 0
        while num_read < 30_000:
            num_read += len(client.recv(65536))
        await_true(lambda: all(each.cycle.response_complete for each in connections))  # type: ignore[union-attr]
        server.should_exit = True
        await_true(lambda: not connections)
    assert "did not read" not in caplog.text


def test_a_large_body_is_read_whole_over_https() -> None:
    body = random.Random(0).randbytes(2_000_000)
    with running(tell_body, ApiSettings(ssl_certfile=str(PEM))) as port:
        answer = httpx.post(f"https://127.0.0.1:{port}/", content=body, timeout=PATIENCE, verify=False).text
    assert answer == hashlib.sha256(body).hexdigest()
