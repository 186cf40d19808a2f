"""The client's connections share what is costly, and notice that a machine has vanished."""

import asyncio
import socket
import ssl
from typing import Any

import pytest

from keepsight.bench.address import Address
from keepsight.bench.http_connection import connecting


def test_trusted_certificates_are_read_once_for_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[Any] = []

    async def connect(*_: object, ssl: Any) -> Any:
        contexts.append(ssl)
        raise ConnectionRefusedError

    async def connect_twice() -> None:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                async with connecting(Address.parse("https://a.example/v1")):
                    pass

    monkeypatch.setattr(asyncio, "open_connection", connect)
    asyncio.run(connect_twice())
    first, second = contexts
    assert first is second
    assert first.verify_mode == ssl.CERT_REQUIRED


def test_a_machine_that_vanished_is_noticed_though_an_answer_may_take_any_time() -> None:
    async def connect(port: int) -> list[int]:
        async with connecting(Address("127.0.0.1", port, "/v1", is_secure=False)) as connection:
            own = connection._writer.get_extra_info("socket")
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            return [own.getsockopt(socket.IPPROTO_TCP, each) for each in options]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        idle, interval, count = asyncio.run(connect(listener.getsockname()[1]))
    assert idle + interval * count <= 25
