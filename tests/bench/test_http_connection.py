"""The client's connections share what is costly."""

import asyncio
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
