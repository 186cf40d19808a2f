"""Steps with longer slices, recorded once on a GPU for some numbers of tokens and then replayed.

A prompt of some hundred tokens is launched more slowly than it is computed.  What it is made of, pictures in it or not,
lies in one tensor before that; what the layers read besides is a `RecordedBatch`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from keepsight.models.attention import AttentionBatch, LayerCache
from keepsight.models.model import DeepRows, Model
from keepsight.models.paged_attention import PagedAttention
from keepsight.models.recorded_batch import RecordedBatch
from keepsight.runner.record_graph import Record

# Numbers of tokens.  Of more a device computes as long as they take to be launched.
SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


class PromptGraphs:
    def __init__(
        self, model: Model, caches: Sequence[LayerCache], block_size: int, sizes: Sequence[int], record: Record
    ) -> None:
        # The largest first: the others have room in what it took.
        steps = [RecordedPrompt(model, caches, block_size, size, record) for size in sorted(sizes, reverse=True)]
        self._steps = steps[::-1]

    def find(self, batch: AttentionBatch) -> "RecordedPrompt | None":
        """The smallest that has room for it; of its slices the ends alone are read."""
        if batch.adapted:  # what is laid over the model's weights was not recorded with them
            return None
        return next((step for step in self._steps if step.batch.has_room_for(batch)), None)


class RecordedPrompt:
    def __init__(
        self, model: Model, caches: Sequence[LayerCache], block_size: int, num_tokens: int, record: Record
    ) -> None:
        device = model.place.device
        self.batch = RecordedBatch(num_tokens, block_size, device, turns_by_rows=model.shape.turns_by_rows)
        self._embeddings = model.embed_tokens(torch.zeros(num_tokens, dtype=torch.int64, device=device))
        # What pictures add behind the first layers: nothing to the tokens of text.
        hidden_size = self._embeddings.shape[1]
        num_deep = max(0, model.shape.media_width // hidden_size - 1)
        self._deep = self._embeddings.new_zeros(num_tokens, num_deep, hidden_size)
        self._is_deep = False
        deep, attention = [DeepRows(0, self._deep)] if num_deep else [], PagedAttention()
        self._replay = record(
            lambda: model.compute(self._embeddings, attention, caches, self.batch, None, deep),
        )

    def compute(self, embeddings: Tensor, batch: AttentionBatch, deep: Sequence[DeepRows]) -> Tensor:
        """[tokens, hidden] -> [read, hidden], until the next recorded step"""
        self._embeddings[: len(embeddings)] = embeddings
        self._add_deep(deep)
        self.batch.replace(batch)
        return self._replay()[: batch.num_read]

    def _add_deep(self, deep: Sequence[DeepRows]) -> None:
        if self._is_deep:
            self._deep.zero_()
        self._is_deep = bool(deep)
        for first, rows in deep:
            self._deep[first : first + len(rows)] = rows
