"""A model's prefill and decode of a prompt with one picture and some words, without an engine."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from keepsight.media import TokenSpan
from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.model import Model
from keepsight.models.paged_attention import PagedAttention
from keepsight.runner.kv_block_store import KvBlockStore

BLOCK_SIZE, NUM_WORDS, CONTEXT = 16, 100, 512
_FIRST_PICTURE_TOKEN = 4


class ModelWork:
    def __init__(self, model: Model, num_image_tokens: int | None = None) -> None:
        """`num_image_tokens` is the picture's number of tokens, for models where it varies."""
        self.model, self._place = model, model.place
        self._num_image_tokens = model.shape.tokens_per_image if num_image_tokens is None else num_image_tokens
        num_blocks = -(-max(CONTEXT, self._num_image_tokens + NUM_WORDS) // BLOCK_SIZE)
        self._store = KvBlockStore(model.shape, num_blocks, BLOCK_SIZE, self._place, num_state_slots=1)
        self._attention = PagedAttention()
        self._blocks = BlockTable(BLOCK_SIZE, range(num_blocks), self._place.device)

    def prefill(self) -> Tensor:
        length = self._num_image_tokens
        is_whole = length and self.model.shape.sees_pictures_whole
        spans = (TokenSpan(_FIRST_PICTURE_TOKEN, length),) if is_whole else ()
        return self._compute(RequestSlice(0, NUM_WORDS + length, self._blocks, spans, state_slot=0))

    def decode(self) -> Tensor:
        return self._compute(RequestSlice(CONTEXT - 2, 1, self._blocks, state_slot=0))

    def _compute(self, piece: RequestSlice) -> Tensor:
        batch = AttentionBatch([piece], self._place.device, read=[0])
        token_ids = torch.zeros(piece.length, dtype=torch.int64, device=self._place.device)
        embeddings = self.model.embed_tokens(token_ids)
        store = self._store
        hidden = self.model.compute(embeddings, self._attention, store.layers, batch, states=store.states.of_layers)
        return self.model.logits(hidden)


def median_seconds(work: Callable[[], object], runs: int, device: torch.device) -> float:
    """Return the median time of `runs` runs, after one that is not counted."""
    work()
    taken = []
    for _ in range(runs):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
