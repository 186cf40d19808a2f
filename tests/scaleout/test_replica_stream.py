"""Connections as httpcore uses them: whatever happens to one is an error that httpcore knows."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import httpcore
import pytest

from keepsight.scaleout.replica_stream import ReplicaBackend

LOOPS = ("asyncio", "uvloop")


def run(loop: str, work: Coroutine[Any, Any, None]) -> None:
    pytest.importorskip(loop).run(work)


async def connect(port: int) -> httpcore.AsyncNetworkStream:
    return await ReplicaBackend(None).connect_tcp("127.0.0.1", port, timeout=30)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_closed_connection_is_known_to_be_and_cannot_be_written_to(loop: str) -> None:
    async def use(port: int) -> None:
        stream = await connect(port)
        assert not stream.get_extra_info("is_readable")
        await stream.aclose()
        await asyncio.sleep(0)
        assert stream.get_extra_info("is_readable")
        with pytest.raises(httpcore.WriteError):
            await stream.write(b"a")

    with socket.create_server(("127.0.0.1", 0)) as server:
        run(loop, use(server.getsockname()[1]))


@pytest.mark.parametrize("loop", LOOPS)
def test_where_nobody_listens_or_no_host_can_be_is_an_error_of_connecting(loop: str) -> None:
    async def use(host: str, port: int) -> None:
        with pytest.raises(httpcore.ConnectError):
            await ReplicaBackend(None).connect_tcp(host, port, timeout=30)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run(loop, use("127.0.0.1", port))
    run(loop, use("a..b", port))
