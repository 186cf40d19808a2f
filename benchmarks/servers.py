"""OpenAI-compatible servers to measure, Keepsight's and vLLM's, each started, asked as a client asks, and ended.

What a server says while it starts is shown only if it does not come up.
"""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers import MAX_MODEL_LEN, peer_environment

START_UP_SECONDS = 600
SERVERS = {"keepsight-serve": ["-m", "keepsight"], "vllm-serve": ["-m", "vllm.entrypoints.cli.main"]}
# Messages, and the length of the answer; yields at each of its tokens.
Ask = Callable[[list[dict[str, Any]], int], AsyncIterator[None]]


@asynccontextmanager
async def serve(name: str, model: Path, vllm_python: str | None) -> AsyncIterator[Ask]:
    """The server runs until the block ends."""
    python = vllm_python if name == "vllm-serve" else sys.executable
    assert python is not None, name
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--served-model-name", "model", "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
    command = [python, *SERVERS[name], "serve", str(model.resolve()), *options, "--dtype", "float32"]
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=None) as client, running(command, client):
        yield partial(ask_greedily, client)


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
    """The first chunk of an answer may bring the role alone."""
    return any(choice["delta"].get("content") or choice.get("finish_reason") is not None for choice in chunk["choices"])


@asynccontextmanager
async def running(command: Sequence[str], client: httpx.AsyncClient) -> AsyncIterator[None]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=peer_environment(), stdout=log, stderr=log)
        try:
            if not await comes_up(client, process):
                log.seek(0)
                raise SystemExit(f"{command} did not start:\n{log.read()[-4000:].decode(errors='replace')}")
            yield
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


async def comes_up(client: httpx.AsyncClient, process: subprocess.Popen[bytes]) -> bool:
    for _ in range(START_UP_SECONDS):
        with suppress(httpx.TransportError):
            if (await client.get("/health")).is_success:
                return True
        if process.poll() is not None:
            return False
        await asyncio.sleep(1)
    return False
