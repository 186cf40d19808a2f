"""CUDA graphs of steps with longer slices: recorded once for some token counts and then replayed.

A prompt of some hundred tokens takes longer to launch than to compute. Its input embeddings, those of pictures
included, are written to one tensor before the replay; everything else that the layers read is in a `RecordedBatch`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from keepsight.models.attention import AttentionBatch
from keepsight.models.model import DeepRows, Model
from keepsight.models.paged_attention import PagedAttention
from keepsight.models.recorded_batch import RecordedBatch
from keepsight.runner.kv_block_store import KvBlockStore
from keepsight.runner.record_graph import Record

# Token counts to record. Beyond these, computing a step takes as long as launching it.
SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


class PromptGraphs:
    def __init__(self, model: Model, blocks: KvBlockStore, sizes: Sequence[int], record: Record) -> None:
        inputs = PromptInputs(model, max(sizes))
        # The largest first: the others fit in the memory that it took.
        steps = [RecordedPrompt(model, blocks, inputs, size, record) for size in sorted(sizes, reverse=True)]
        self._steps = steps[::-1]

    def find(self, batch: AttentionBatch) -> "RecordedPrompt | None":
        """Return the smallest recorded step with room for a batch that reads only its slices' ends; None if none."""
        if batch.adapted:  # adapters are not part of the recordings
            return None
        return next((step for step in self._steps if step.batch.has_room_for(batch)), None)


class PromptInputs:
    """The inputs of a step, in memory that the recordings of all sizes read."""

    def __init__(self, model: Model, num_tokens: int) -> None:
        self.embeddings = model.embed_tokens(torch.zeros(num_tokens, dtype=torch.int64, device=model.place.device))
        hidden_size = self.embeddings.shape[1]
        # What pictures add behind the first layers; zero for text tokens.
        num_deep = max(0, model.shape.media_width // hidden_size - 1)
        self.deep = self.embeddings.new_zeros(num_tokens, num_deep, hidden_size)
        self._is_deep = False

    def replace(self, embeddings: Tensor, deep: Sequence[DeepRows]) -> None:
        self.embeddings[: len(embeddings)] = embeddings
        if self._is_deep:
            self.deep.zero_()
        self._is_deep = bool(deep)
        for first, rows in deep:
            self.deep[first : first + len(rows)] = rows


class RecordedPrompt:
    def __init__(
        self, model: Model, blocks: KvBlockStore, inputs: PromptInputs, num_tokens: int, record: Record
    ) -> None:
        device, caches, states = model.place.device, blocks.layers, blocks.states.of_layers
        self.batch = RecordedBatch(
            num_tokens,
            blocks.block_size,
            device,
            uses_mrope=model.shape.uses_mrope,
            spare_slot=blocks.states.spare_slot,
        )
        self._inputs = inputs
        embeddings, added = inputs.embeddings[:num_tokens], inputs.deep[:num_tokens]
        deep, attention = [DeepRows(0, added)] if added.numel() else [], PagedAttention()
        self._replay = record(lambda: model.compute(embeddings, attention, caches, self.batch, None, deep, states))

    def compute(self, embeddings: Tensor, batch: AttentionBatch, deep: Sequence[DeepRows]) -> Tensor:
        """Replay the step: [tokens, hidden] -> [read, hidden], valid until the next recorded step."""
        self._inputs.replace(embeddings, deep)
        self.batch.replace(batch)
        return self._replay()[: batch.num_read]
