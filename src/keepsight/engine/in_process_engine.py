"""An engine in the server's own process: one request at a time, on one thread of its own."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from keepsight.requests import EngineRequest, TokenOutput
from keepsight.runner.model_runner import ModelRunner


class InProcessEngine:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._turn = asyncio.Lock()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        loop = asyncio.get_running_loop()
        async with self._turn:
            tokens = self._runner.generate(request)
            try:
                while (token := await loop.run_in_executor(self._thread, next, tokens, None)) is not None:
                    yield token
            finally:
                # On its own thread: a client that left may leave it in the middle of a step.
                self._thread.submit(tokens.close)
