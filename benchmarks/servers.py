"""Starts, queries and stops the OpenAI-compatible servers to measure, Keepsight's and vLLM's.

A server's output is shown only if it does not start.
"""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers import MAX_MODEL_LEN, peer_environment, precision_of

START_UP_SECONDS, STOP_SECONDS = 600, 30
SERVERS = {"keepsight-serve": ["-m", "keepsight"], "vllm-serve": ["-m", "vllm.entrypoints.cli.main"]}
READY_PATHS = {"keepsight-serve": "/ready", "vllm-serve": "/health"}
# Takes messages and the length of the answer; yields at each token of the answer.
Ask = Callable[[list[dict[str, Any]], int], AsyncIterator[None]]


class ServerProcess:
    """One server command on one port, which may be restarted."""

    def __init__(self, name: str, model: Path, vllm_python: str | None, *options: str) -> None:
        python = vllm_python if name == "vllm-serve" else sys.executable
        assert python is not None, name
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        own = ["--served-model-name", "model", "--port", str(self.port), "--max-model-len", str(MAX_MODEL_LEN)]
        self._command = [
            *(python, *SERVERS[name], "serve", str(model.resolve()), *own, "--dtype", precision_of(model)),
            *options,
        ]
        self.url, self._ready_path = f"http://127.0.0.1:{self.port}", READY_PATHS[name]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> float:
        """Start the server.  Return the seconds until it is ready."""
        started = time.perf_counter()
        self._process = subprocess.Popen(self._command, env=peer_environment(), stdout=self._log, stderr=self._log)
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as client:
            if await wait_until_ready(client, self._ready_path, self._process):
                return time.perf_counter() - started
        self._log.seek(0)
        log_end = self._log.read()[-4000:].decode(errors="replace")
        raise SystemExit(f"{self._command} did not start:\n{log_end}")

    async def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        self._process.kill()
        self._process.wait()


@asynccontextmanager
async def serve(name: str, model: Path, vllm_python: str | None) -> AsyncIterator[Ask]:
    """Run a server until the block ends."""
    server = ServerProcess(name, model, vllm_python)
    try:
        await server.start()
        async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
            yield partial(ask_greedily, client)
    finally:
        await server.stop()


async def ask_greedily(
    client: httpx.AsyncClient, messages: list[dict[str, Any]], max_tokens: int
) -> AsyncIterator[None]:
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    body = {"model": "model", "messages": messages, "stream": True, **sampling}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise SystemExit(f"refused: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {") and is_token(json.loads(line.removeprefix("data: "))):
                yield


def is_token(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk holds a token: the first chunk of an answer may hold only the role."""
    return any(choice["delta"].get("content") or choice.get("finish_reason") is not None for choice in chunk["choices"])


async def wait_until_ready(client: httpx.AsyncClient, ready_path: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_UP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if (await client.get(ready_path)).is_success:
                return True
        await asyncio.sleep(0.05)
    return False
