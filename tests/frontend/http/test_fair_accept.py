"""Fair accepting over real sockets; each acceptor answers with its name."""

import asyncio
import errno
import logging
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import uvicorn

from keepsight.api_settings import ApiSettings
from keepsight.certificate import Certificate
from keepsight.frontend.http import fair_accept
from keepsight.frontend.http.fair_accept import Acceptor, FairAcceptServer
from keepsight.frontend.http.http_server import make_server

PEM = Path(__file__).parents[1] / "pictures_test.pem"
CERTIFICATE = Certificate(ApiSettings(ssl_certfile=str(PEM)))
SOON = 20  # seconds; normally takes milliseconds


class Greeter(asyncio.Protocol):
    def __init__(self, greeted: "Counter[str]", name: str) -> None:
        self._greeted, self._name = greeted, name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._greeted[self._name] += 1
        transport.write(self._name.encode() + b"\n")
        transport.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield listener


async def greeting(port: int) -> str:
    reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), SOON)
    line = await asyncio.wait_for(reader.readline(), SOON)
    writer.close()
    return line.decode().strip()


def test_simultaneous_connections_are_spread_over_all_acceptors(listener: socket.socket) -> None:
    async def run() -> Counter[str]:
        port = listener.getsockname()[1]
        greeted = Counter[str]()
        waiting = [asyncio.create_task(greeting(port)) for _ in range(64)]
        # As with several processes: each has its own descriptor of the one socket.
        others = [listener.dup() for _ in range(4)]
        acceptors = [Acceptor(each, partial(Greeter, greeted, str(index))) for index, each in enumerate(others)]
        heard = Counter(await asyncio.gather(*waiting))
        for acceptor, each in zip(acceptors, others, strict=True):
            acceptor.close()
            each.close()
        assert heard == greeted
        return heard

    heard = asyncio.run(run())
    assert heard.total() == 64
    assert len(heard) == 4, heard


def test_a_server_reports_accepting_only_after_it_has_started(listener: socket.socket) -> None:
    server, reported = FairAcceptServer(uvicorn.Config("no.such:app", log_config=None)), list[bool]()
    server.on_accepting = lambda: reported.append(server.started)
    with pytest.raises(ModuleNotFoundError):
        server.run(sockets=[listener])
    assert not reported
    server = FairAcceptServer(uvicorn.Config(lambda *_: None, lifespan="off", log_config=None))
    server.should_exit = True
    server.on_accepting = lambda: reported.append(server.started)
    server.run(sockets=[listener])
    assert reported == [True]


def test_an_acceptor_out_of_descriptors_accepts_later(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_accept, "RETRY_SECONDS", 0.01)

    class Exhausted:
        """A listener whose first three accepts fail."""

        num_failures = 0

        def accept(self) -> tuple[socket.socket, object]:
            if self.num_failures < 3:
                self.num_failures += 1
                raise OSError(errno.EMFILE, "too many open files")
            return listener.accept()

        def fileno(self) -> int:
            return listener.fileno()

        def setblocking(self, flag: bool) -> None:
            listener.setblocking(flag)

    async def run() -> str:
        exhausted = Exhausted()
        acceptor = Acceptor(exhausted, lambda: Greeter(Counter(), "me"))  # type: ignore[arg-type]
        heard = await greeting(listener.getsockname()[1])
        acceptor.close()
        assert exhausted.num_failures == 3
        return heard

    assert asyncio.run(run()) == "me"


async def started(listener: socket.socket, certificate: Certificate | None = None) -> FairAcceptServer:
    server = FairAcceptServer(uvicorn.Config(lambda *_: None, lifespan="off", log_config=None))
    server.certificate = certificate
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([listener])
    return server


def accept_one_more(server: FairAcceptServer, client: socket.socket, listener: socket.socket) -> None:
    client.settimeout(SOON)
    client.connect(listener.getsockname())
    [acceptor] = server._acceptors
    while not acceptor._handshakes:
        acceptor._accept_one()


# A TLS handshake takes longer than a server waits for it while shutting down.
@pytest.mark.parametrize("certificate", [None, CERTIFICATE], ids=["plain", "tls"])
def test_a_connection_accepted_just_before_shutdown_is_closed(
    listener: socket.socket, certificate: Certificate | None
) -> None:
    async def run() -> None:
        server = await started(listener, certificate)
        with socket.socket() as client:
            accept_one_more(server, client, listener)
            await asyncio.wait_for(server.shutdown(), SOON)
            assert client.recv(1) == b""

    asyncio.run(run())


async def never_called(_scope: object, _receive: object, _send: object) -> None:
    raise AssertionError


def test_a_client_that_never_begins_the_handshake_is_cut_off(listener: socket.socket) -> None:
    async def run() -> None:
        server = make_server(never_called, ApiSettings(ssl_certfile=str(PEM), slow_client_seconds=0.01))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([listener])
        with socket.socket() as client:
            accept_one_more(server, client, listener)
            [handshake] = server._acceptors[0]._handshakes
            await asyncio.wait_for(handshake, SOON)
            assert client.recv(1) == b""
        await server.shutdown()

    asyncio.run(run())


def test_clients_that_leave_during_the_handshake_are_logged_once_a_minute(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, fair_accept.__name__)

    async def run() -> None:
        server = await started(listener, CERTIFICATE)
        [acceptor] = server._acceptors
        for _ in range(3):
            ours, theirs = socket.socketpair()
            theirs.close()
            ours.setblocking(False)
            await acceptor._hand_over(ours)
        await server.shutdown()

    asyncio.run(run())
    found = [each for each in caplog.records if each.name == fair_accept.__name__]
    assert [each.levelno for each in found] == [logging.INFO, logging.DEBUG, logging.DEBUG]
    assert all(re.search(r"could not be set up: \w+Error\(", each.message) for each in found)


def test_a_server_told_to_exit_wakes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_accept, "TICK_SECONDS", 1000 * SOON)
    server = FairAcceptServer(uvicorn.Config(lambda: None))

    async def run() -> None:
        serving = asyncio.create_task(server.main_loop())
        await asyncio.sleep(0)
        assert server.server_state.default_headers, "answers are given their date"
        telling = threading.Thread(target=setattr, args=(server, "should_exit", True))
        telling.start()
        await asyncio.wait_for(serving, SOON)
        telling.join()
        server.should_exit = True  # again, with no sleeper left to wake

    asyncio.run(run())
