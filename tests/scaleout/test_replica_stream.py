"""Connections as httpcore uses them: whatever happens to one is an error that httpcore knows."""

import asyncio
import socket

import httpcore
import pytest
import uvloop

from keepsight.scaleout.replica_stream import ReplicaBackend

RUNNERS = (asyncio.run, uvloop.run)


async def connect(port: int) -> httpcore.AsyncNetworkStream:
    return await ReplicaBackend(None).connect_tcp("127.0.0.1", port, timeout=30)


@pytest.mark.parametrize("run", RUNNERS)
def test_a_closed_connection_is_known_to_be_and_cannot_be_written_to(run: object) -> None:
    async def use(port: int) -> None:
        stream = await connect(port)
        assert not stream.get_extra_info("is_readable")
        await stream.aclose()
        await asyncio.sleep(0)
        assert stream.get_extra_info("is_readable")
        with pytest.raises(httpcore.WriteError):
            await stream.write(b"a")

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert callable(run)
        run(use(server.getsockname()[1]))


@pytest.mark.parametrize("run", RUNNERS)
def test_where_nobody_listens_or_no_host_can_be_is_an_error_of_connecting(run: object) -> None:
    async def use(host: str, port: int) -> None:
        with pytest.raises(httpcore.ConnectError):
            await ReplicaBackend(None).connect_tcp(host, port, timeout=30)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert callable(run)
    run(use("127.0.0.1", port))
    run(use("a..b", port))
