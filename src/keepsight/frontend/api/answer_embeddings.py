"""The answer to an embeddings request: one vector per prompt, all sent together."""

import asyncio
import base64
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from keepsight.frontend.api.answer import AskedPrompts, Engine
from keepsight.frontend.api.embeddings_request import Embedding, EmbeddingList, EmbeddingsRequest
from keepsight.frontend.api.response_parts import Usage
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.read_vector import Vector, read_vector

# Prompts of one request that the engine has at once: each is a sequence that it holds.
MAX_AT_ONCE = 256


class EmbeddingsAnswer(AskedPrompts):
    ID_PREFIX = "embd-"

    def __init__(self, request: EmbeddingsRequest, prompts: Sequence[PreparedRequest], model_name: str) -> None:
        super().__init__(prompts, model_name, wants_account=request.wants_account)
        self._request, self._num_cached_tokens = request, 0

    @property
    def usage(self) -> Usage:
        return self._count_usage(0, self._num_cached_tokens)

    async def whole(self, engine: Engine) -> EmbeddingList:
        room = asyncio.Semaphore(MAX_AT_ONCE)
        asking = [asyncio.ensure_future(self._ask(engine, *each, room)) for each in enumerate(self.prompts)]
        try:
            data = await asyncio.gather(*asking)
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return self._with_account(
            EmbeddingList(id=self.id, created=self._created, model=self._model_name, data=data, usage=self.usage)
        )

    async def _ask(self, engine: Engine, index: int, prepared: PreparedRequest, room: asyncio.Semaphore) -> Embedding:
        """Return the embedding of one prompt. It comes with the first token, which is the only one."""
        async with room, aclosing(engine.generate(prepared)) as tokens:
            output = await anext(tokens)
        self._num_cached_tokens += output.num_cached_tokens
        vector = read_vector(output, self._request.dimensions, is_normalized=self._request.is_normalized)
        return Embedding(index=index, embedding=self._write(vector))

    def _write(self, vector: Vector) -> msgspec.Raw:
        """Encode a vector as JSON: as numbers, or as base64 of its float32 bytes, little-endian."""
        is_base64 = self._request.encoding_format == "base64"
        shown = base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()
        return msgspec.Raw(msgspec.json.encode(shown))
