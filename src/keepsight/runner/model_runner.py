"""Runs one request from its prompt to its last token.

Pages are handed out here as long as there is no scheduler: the choices of one request share the whole pages of its
prompt and nothing outlives the request.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.model import Model
from keepsight.models.paged_attention import PagedAttention
from keepsight.requests import EngineRequest, FinishReason, TokenOutput
from keepsight.runner.encode_media import encode_media
from keepsight.runner.kv_block_store import KvBlockStore
from keepsight.runner.merge_embeddings import merge_embeddings
from keepsight.runner.normalize_pixels import PixelNormalizer
from keepsight.runner.sample_tokens import SampledToken, SamplingState, sample_tokens

BLOCK_SIZE = 16


@dataclass(slots=True)
class _Choice:
    """One of a request's answers while it grows."""

    index: int
    sampling: SamplingState
    block_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)


class ModelRunner:
    def __init__(
        self, model: Model, normalizer: PixelNormalizer | None, end_ids: frozenset[int], max_model_len: int
    ) -> None:
        self.model, self.normalizer, self.end_ids, self.max_model_len = model, normalizer, end_ids, max_model_len
        self.attention = PagedAttention()

    def generate(self, request: EngineRequest) -> Generator[TokenOutput, None, None]:
        """The tokens of all choices as they are sampled; closing the iterator abandons the request."""
        choices, store = self._lay_out(request)
        logits = self._compute_prompt(request, store, choices)
        while choices:
            sampled = self._sample(logits.expand(len(choices), -1), choices)
            outputs = [self._output(choice, token, request) for choice, token in zip(choices, sampled, strict=True)]
            yield from outputs
            choices = [choice for choice, output in zip(choices, outputs, strict=True) if output.finish_reason is None]
            if choices:
                logits = self._compute_next(request, store, choices)

    def _lay_out(self, request: EngineRequest) -> tuple[list[_Choice], KvBlockStore]:
        """Pages for the prompt's whole blocks come first and are shared; then come each choice's own."""
        num_shared = len(request.token_ids) // BLOCK_SIZE
        num_own = -(-self._max_length(request) // BLOCK_SIZE) - num_shared
        params = request.sampling_params
        store = KvBlockStore(self.model.shape, num_shared + params.n * num_own, BLOCK_SIZE, self.model.place)
        shared = tuple(range(num_shared))
        device = self.model.place.device
        choices = []
        for index in range(params.n):
            first_own = num_shared + index * num_own
            sampling = SamplingState(params, request.token_ids, self.end_ids, index, device)
            choices.append(_Choice(index, sampling, shared + tuple(range(first_own, first_own + num_own))))
        return choices, store

    def _max_length(self, request: EngineRequest) -> int:
        max_tokens = request.sampling_params.max_tokens
        if max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, len(request.token_ids) + max_tokens)

    @torch.inference_mode()
    def _compute_prompt(self, request: EngineRequest, store: KvBlockStore, choices: Sequence[_Choice]) -> Tensor:
        """Logits [1, vocabulary] of the first token, which all choices draw from."""
        model, first = self.model, choices[0]
        length = len(request.token_ids)
        embeddings = model.embed_tokens(torch.tensor(request.token_ids, device=model.place.device))
        if request.media:
            assert self.normalizer is not None
            merge_embeddings(embeddings, request.media, encode_media(model, self.normalizer, request.pixels))
        spans = tuple(item.span for item in request.media)
        batch = AttentionBatch([RequestSlice(0, length, first.block_ids, spans)], BLOCK_SIZE, model.place.device)
        hidden = model.compute(embeddings, self.attention, store.layers, batch)
        if length % BLOCK_SIZE:
            for other in choices[1:]:
                store.copy_block(first.block_ids[length // BLOCK_SIZE], other.block_ids[length // BLOCK_SIZE])
        return model.logits(hidden[-1:])

    @torch.inference_mode()
    def _compute_next(self, request: EngineRequest, store: KvBlockStore, choices: Sequence[_Choice]) -> Tensor:
        """Logits [choices, vocabulary]."""
        model = self.model
        slices = [
            RequestSlice(len(request.token_ids) + len(choice.token_ids) - 1, 1, choice.block_ids) for choice in choices
        ]
        batch = AttentionBatch(slices, BLOCK_SIZE, model.place.device)
        last_ids = torch.tensor([choice.token_ids[-1] for choice in choices], device=model.place.device)
        return model.logits(model.compute(model.embed_tokens(last_ids), self.attention, store.layers, batch))

    @torch.inference_mode()
    def _sample(self, logits: Tensor, choices: Sequence[_Choice]) -> list[SampledToken]:
        return sample_tokens(logits, [choice.sampling for choice in choices])

    def _output(self, choice: _Choice, token: SampledToken, request: EngineRequest) -> TokenOutput:
        choice.token_ids.append(token.token_id)
        finish_reason: FinishReason | None = None
        if choice.sampling.ends_with(token.token_id):
            finish_reason = "stop"
        elif len(request.token_ids) + len(choice.token_ids) >= self._max_length(request):
            finish_reason = "length"
        return TokenOutput(choice.index, token.token_id, token.logprobs, finish_reason)
