"""Connections to a replica: whatever happens to one is an error of it, and what is left over is nobody's answer."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import pytest

from keepsight.errors import Loss, ReplicaLostError, ServerOverloadedError
from keepsight.scaleout.replica_connection import ReplicaConnection

# A self-signed certificate.
CERTIFICATE = Path(__file__).parents[1] / "frontend" / "pictures_test.pem"
LOOPS = ("asyncio", "uvloop")
QUESTION = h11.Request(method="GET", target="/", headers=[("host", "x")])
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
# More than the kernel takes in for a server that reads nothing.
BODY = bytes(2**25)
UPLOAD = h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", str(len(BODY)))])
REFUSAL = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"


def run(loop: str, work: Coroutine[Any, Any, None]) -> None:
    pytest.importorskip(loop).run(work)


class Pair:
    """A connection, and the server's end of it."""

    def __init__(self, own: ReplicaConnection, other: socket.socket) -> None:
        self.own, self.other = own, other

    async def ask(self, answer: bytes = ANSWER) -> bytes:
        """Return the body that is found in an answer."""
        self.other.sendall(answer)
        await self.own.begin(QUESTION, [])
        return b"".join([piece async for piece in self.own.pieces()])

    async def begin_upload(self) -> int:
        """Return the status that is answered."""
        pieces = (memoryview(BODY)[at : at + 2**18] for at in range(0, len(BODY), 2**18))
        return (await self.own.begin(UPLOAD, pieces)).status_code

    async def say(self, text: bytes) -> None:
        """Return once it has come."""
        self.other.sendall(text)
        async with asyncio.timeout(30):
            while self.own._reader.num_unread < len(text):
                await asyncio.sleep(0)

    def reset(self) -> None:
        self.other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.other.close()

    async def wait_until_unusable(self) -> None:
        async with asyncio.timeout(30):
            while self.own.is_usable:
                await asyncio.sleep(0)


async def connect() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = await ReplicaConnection.open("127.0.0.1", server.getsockname()[1], None)
        return Pair(own, server.accept()[0])


@pytest.mark.parametrize("loop", LOOPS)
def test_one_request_follows_the_other(loop: str) -> None:
    async def use() -> None:
        pair = await connect()
        with pair.other:
            for _ in range(3):
                assert await pair.ask() == b"ok"
                assert pair.own.end()
                assert pair.own.is_usable

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("surplus", [ANSWER, b"\r\n", b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"])
def test_what_comes_with_an_answer_is_not_the_next_ones(loop: str, surplus: bytes) -> None:
    async def use() -> None:
        pair = await connect()
        with pair.other:
            assert await pair.ask(ANSWER + surplus) == b"ok"
            assert not (pair.own.end() and pair.own.is_usable)

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("is_closed", [False, True])
def test_nor_is_what_comes_while_nothing_is_asked(loop: str, is_read: bool, is_closed: bool) -> None:
    async def use() -> None:
        pair = await connect()
        with pair.other:
            assert await pair.ask() == b"ok"
            assert pair.own.end()
            pair.other.sendall(ANSWER)
            if is_closed:
                pair.other.close()
            if is_read:
                for _ in range(10):
                    await asyncio.sleep(0)
            assert not pair.own.is_usable

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_an_answer_that_was_not_read_to_its_end_takes_the_connection_with_it(loop: str) -> None:
    async def use() -> None:
        pair = await connect()
        with pair.other:
            pair.other.sendall(ANSWER)
            await pair.own.begin(QUESTION, [])
            assert not pair.own.end()
            await asyncio.sleep(0)
            assert not pair.own.is_usable

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_closed_connection_is_known_to_be_and_is_an_error_to_use(loop: str) -> None:
    async def use() -> None:
        pair = await connect()
        pair.other.close()
        await pair.wait_until_unusable()
        with pytest.raises(ReplicaLostError):
            await pair.own.begin(QUESTION, [])
        pair = await connect()
        with pair.other:
            pair.own.close()
            assert not pair.own.is_usable
            with pytest.raises(ReplicaLostError):
                await pair.own.begin(QUESTION, [])

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_refusal_of_an_upload_counts_even_if_the_connection_is_then_reset(loop: str) -> None:
    async def use() -> None:
        pair = await connect()
        uploading = asyncio.create_task(pair.begin_upload())
        await pair.say(REFUSAL)
        pair.reset()
        assert await uploading == 413
        assert b"".join([piece async for piece in pair.own.pieces()]) == b"no"
        assert not pair.own.end()

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("says_why", [False, True])
def test_a_server_that_takes_nothing_in_is_lost_unless_it_says_why(
    loop: str, says_why: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepsight.scaleout.replica_connection.WRITE_SECONDS", 0.1)

    async def use() -> None:
        pair = await connect()
        with pair.other:
            if says_why:
                await pair.say(REFUSAL)
                assert await pair.begin_upload() == 413
            else:
                with pytest.raises(ReplicaLostError, match="takes nothing in"):
                    await pair.begin_upload()

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_an_answer_without_a_length_is_not_whole_if_the_connection_is_reset(loop: str) -> None:
    async def use() -> None:
        pair = await connect()
        await pair.say(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nab")
        assert (await pair.own.begin(QUESTION, [])).status_code == 200
        pieces = pair.own.pieces()
        assert await anext(pieces) == b"ab"
        pair.reset()
        with pytest.raises(ReplicaLostError):
            await anext(pieces)

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_said_before_the_answer_is_passed_over(loop: str) -> None:
    async def use() -> None:
        pair = await connect()
        with pair.other:
            hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
            for _ in range(2):
                assert await pair.ask(hints + ANSWER) == b"ok"
                assert pair.own.end()

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 999 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: a\x01b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    ],
)
def test_what_cannot_be_passed_on_is_no_answer(loop: str, said: bytes) -> None:
    async def use() -> None:
        pair = await connect()
        with pair.other:
            pair.other.sendall(said)
            pair.other.shutdown(socket.SHUT_WR)
            with pytest.raises(ReplicaLostError):
                await pair.own.begin(QUESTION, [])

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_the_kernel_gives_up_a_machine_that_vanished_whether_anything_is_being_sent_or_not(loop: str) -> None:
    async def use() -> None:
        pair = await connect()
        with pair.other:
            own = pair.own._socket
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, interval, count = (
                own.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + interval * count == 25
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_of_an_answer_that_cannot_be_passed_on_only_the_status_is_told(loop: str) -> None:
    async def use() -> None:
        pair = await connect()
        with pair.other:
            pair.other.sendall(b"HTTP/1.1 999 Odd\r\nDate: Mon\r\nSet-Cookie: a\r\nContent-Length: 0\r\n\r\n")
            with pytest.raises(ReplicaLostError, match=r"^its answer cannot be passed on \(status 999\)$"):
                await pair.own.begin(QUESTION, [])

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_only_where_nobody_listens_the_server_is_gone(loop: str) -> None:
    async def use(host: str, port: int, how: Loss) -> None:
        with pytest.raises(ReplicaLostError, match="cannot be reached") as caught:
            await ReplicaConnection.open(host, port, None)
        assert (caught.value.how, caught.value.may_have_begun) == (how, False)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run(loop, use("127.0.0.1", port, "gone"))
    run(loop, use("a..b", port, "failed"))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_certificate_that_is_not_trusted_is_told_from_other_failures(loop: str) -> None:
    async def use() -> None:
        async with _serving_tls() as port:
            with pytest.raises(ReplicaLostError, match="its certificate is not trusted: self-signed") as caught:
                await ReplicaConnection.open("127.0.0.1", port, ssl.create_default_context())
            assert caught.value.how == "distrusted"

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_certificate_is_of_the_name_whichever_address_it_is_reached_by(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        async with _serving_tls() as port:
            _have_resolved(monkeypatch, "127.0.0.2", "127.0.0.1")
            connection = await ReplicaConnection.open(
                "pictures.test", port, ssl.create_default_context(cafile=CERTIFICATE)
            )
            assert connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            connection.close()

    run(loop, use())


@pytest.mark.parametrize("loop", LOOPS)
def test_if_the_first_address_of_a_name_drops_packets_the_next_one_is_tried(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepsight.scaleout.replica_connection.CONNECT_SECONDS", 3.0)

    async def use(port: int) -> None:
        asked = _have_resolved(monkeypatch, "127.0.0.2", "127.0.0.1")
        connection = await ReplicaConnection.open("two.test", port, None)
        assert asked == ["two.test"]
        assert connection._socket.getpeername()[0] == "127.0.0.1"
        connection.close()

    with ExitStack() as sockets:
        port = sockets.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        _drop_what_comes(sockets, "127.0.0.2", port)
        run(loop, use(port))


def _drop_what_comes(sockets: ExitStack, address: str, port: int) -> None:
    """Listen with a full queue: the kernel drops what comes."""
    sockets.enter_context(full := socket.create_server((address, port), backlog=0))
    for _ in range(4):
        waiting = sockets.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(full.getsockname())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_is_gone_if_none_of_its_addresses_takes_connections(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(port: int) -> None:
        _have_resolved(monkeypatch, "127.0.0.2", "127.0.0.1")
        with pytest.raises(ReplicaLostError, match="cannot be reached") as caught:
            await ReplicaConnection.open("two.test", port, None)
        assert caught.value.how == "gone"

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run(loop, use(port))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_of_which_an_address_drops_packets_is_not_gone_though_others_refuse(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepsight.scaleout.replica_connection.CONNECT_SECONDS", 0.5)

    async def use(port: int) -> None:
        _have_resolved(monkeypatch, "127.0.0.3", "127.0.0.2")
        with pytest.raises(ReplicaLostError, match="no connection within") as caught:
            await ReplicaConnection.open("two.test", port, None)
        assert caught.value.how == "silent"

    with ExitStack() as sockets:
        with socket.create_server(("127.0.0.3", 0)) as server:
            port = server.getsockname()[1]
        _drop_what_comes(sockets, "127.0.0.2", port)
        run(loop, use(port))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_name_that_is_not_resolved_in_time_says_nothing_of_its_machine(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepsight.scaleout.replica_connection.CONNECT_SECONDS", 0.01)

    async def use() -> None:
        async def wait(*_: Any, **__: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", wait)
        with pytest.raises(ReplicaLostError, match=r"no connection within 0\.01 s") as caught:
            await ReplicaConnection.open("two.test", 1, None)
        assert caught.value.how == "failed"

    run(loop, use())


@asynccontextmanager
async def _serving_tls() -> AsyncIterator[int]:
    """Listen with the certificate; yield the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


def _have_resolved(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Have the running loop resolve each name to these; return the list of the names that are asked for."""
    loop, asked = asyncio.get_running_loop(), list[str]()
    resolve = loop.getaddrinfo

    async def answer(host: str, port: int, **terms: Any) -> Any:
        if host in addresses:
            return await resolve(host, port, **terms)
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(loop, "getaddrinfo", answer)
    return asked


def test_a_connection_that_is_not_made_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        async def wait(*_: Any, **__: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", wait)
        with pytest.raises(ReplicaLostError, match=r"no connection within 0\.01 s"):
            await ReplicaConnection.open("10.0.0.1", 1, None)

    monkeypatch.setattr("keepsight.scaleout.replica_connection.CONNECT_SECONDS", 0.01)
    asyncio.run(use())


def test_too_many_open_files_are_no_fault_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        async def fail(*_: Any, **__: Any) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", fail)
        with pytest.raises(ServerOverloadedError):
            await ReplicaConnection.open("10.0.0.1", 1, None)

    asyncio.run(use())
