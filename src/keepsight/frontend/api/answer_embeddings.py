"""The answer to a request for embeddings: of each prompt the vector that the model made of it, all at once."""

import asyncio
import base64
import os
import time
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from keepsight.frontend.api.answer import Engine
from keepsight.frontend.api.embeddings_request import Embedding, EmbeddingList, EmbeddingsRequest
from keepsight.frontend.api.response_parts import Extras, Usage
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.read_vector import Vector, read_vector
from keepsight.observe.account import RequestAccount
from keepsight.requests import TokenOutput

# Of one request's prompts: every one is a sequence that the engine keeps.
MAX_AT_ONCE = 256


class EmbeddingsAnswer:
    is_streamed = False

    def __init__(self, asked: EmbeddingsRequest, prompts: Sequence[PreparedRequest], model_name: str) -> None:
        self._asked, self._prompts, self._model_name = asked, prompts, model_name
        self.id, self._created = f"embd-{os.urandom(16).hex()}", int(time.time())
        self._num_cached_tokens = 0

    @property
    def prompts(self) -> Sequence[PreparedRequest]:
        return self._prompts

    @property
    def accounts(self) -> list[RequestAccount]:
        return [each.account for each in self._prompts]

    def name_accounts(self, request_id: str, began: float, trace_parent: str | None) -> None:
        for account in self.accounts:
            account.name(request_id, began, trace_parent)

    @property
    def usage(self) -> Usage:
        requests = [each.engine_request for each in self._prompts]
        return Usage.count(
            sum(len(each.token_ids) for each in requests),
            0,
            sum(each.num_image_tokens for each in requests),
            self._num_cached_tokens,
            num_audio_tokens=sum(each.num_audio_tokens for each in requests),
        )

    async def whole(self, engine: Engine) -> EmbeddingList:
        room = asyncio.Semaphore(MAX_AT_ONCE)
        asking = [asyncio.ensure_future(_ask(engine, each, room)) for each in self._prompts]
        try:
            told = await asyncio.gather(*asking)
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        self._num_cached_tokens = sum(each.num_cached_tokens for each in told)
        return EmbeddingList(
            id=self.id,
            created=self._created,
            model=self._model_name,
            data=[self._tell(index, each) for index, each in enumerate(told)],
            usage=self.usage,
            keepsight=Extras([each.describe() for each in self.accounts])
            if self._asked.wants_account
            else msgspec.UNSET,
        )

    def _tell(self, index: int, told: TokenOutput) -> Embedding:
        vector = read_vector(told, self._asked.dimensions, is_normalized=self._asked.is_normalized)
        return Embedding(index=index, embedding=self._encode(vector))

    def _encode(self, vector: Vector) -> list[float] | str:
        if self._asked.encoding_format == "base64":
            return base64.b64encode(vector.tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers


async def _ask(engine: Engine, prepared: PreparedRequest, room: asyncio.Semaphore) -> TokenOutput:
    """What is told with the first token, which is the only one."""
    async with room, aclosing(engine.generate(prepared)) as tokens:
        return await anext(tokens)
