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

# Of one request's prompts: every one is a sequence that the engine keeps.
MAX_AT_ONCE = 256


class EmbeddingsAnswer:
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
        asking = [asyncio.ensure_future(self._ask(engine, *each, room)) for each in enumerate(self._prompts)]
        try:
            data = await asyncio.gather(*asking)
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return EmbeddingList(
            id=self.id,
            created=self._created,
            model=self._model_name,
            data=data,
            usage=self.usage,
            keepsight=Extras([each.describe() for each in self.accounts])
            if self._asked.wants_account
            else msgspec.UNSET,
        )

    async def _ask(self, engine: Engine, index: int, prepared: PreparedRequest, room: asyncio.Semaphore) -> Embedding:
        """It is told with the first token, which is the only one."""
        async with room, aclosing(engine.generate(prepared)) as tokens:
            told = await anext(tokens)
        self._num_cached_tokens += told.num_cached_tokens
        vector = read_vector(told, self._asked.dimensions, is_normalized=self._asked.is_normalized)
        return Embedding(index=index, embedding=self._write(vector))

    def _write(self, vector: Vector) -> msgspec.Raw:
        """Of base64 the bytes are those of float32, the lowest first."""
        is_base64 = self._asked.encoding_format == "base64"
        told = base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()
        return msgspec.Raw(msgspec.json.encode(told))
