"""CUDA graphs of steps of single tokens, guesses included: recorded once for some row counts and then replayed.

In such a step the device mostly reads the weights, and launching some four hundred kernels from Python takes longer
than that. A replay is one launch: it reads its inputs from the memory used by the recording, and padding rows write
nothing and attend to nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.model import Model
from keepsight.models.paged_attention import PagedAttention
from keepsight.models.sequence_rows import SequenceRows
from keepsight.runner.kv_block_store import KvBlockStore
from keepsight.runner.record_graph import Record
from keepsight.runner.sequence_table import RunningSequence
from keepsight.runner.step_inputs import make_request_slice, tokens_of
from keepsight.scheduling.step_plan import Slice

# Row counts to record. A step with a count in between is padded to the next one; padding rows read no keys.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class DecodeGraphs:
    def __init__(self, model: Model, blocks: KvBlockStore, sizes: Sequence[int], record: Record) -> None:
        # The largest first: the others fit in the memory that it took.
        steps = [_RecordedStep(model, blocks, size, record) for size in sorted(sizes, reverse=True)]
        self._sizes = sorted(sizes)
        self._steps = steps[::-1]

    def has_room_for(self, slices: Sequence[Slice], sequences: Sequence[RunningSequence]) -> bool:
        """Return whether all slices are single text tokens that sample, without adapters or prompt log-probabilities,
        and keep no states, and there are enough rows.
        """
        return len(slices) <= self._sizes[-1] and all(
            piece.length == 1
            and piece.samples
            and not piece.wants_prompt_logprobs
            and not piece.kept_states
            and piece.start >= sequence.media_end
            and sequence.adapter is None
            for piece, sequence in zip(slices, sequences, strict=True)
        )

    def compute(self, slices: Sequence[Slice], sequences: Sequence[RunningSequence]) -> Tensor:
        """Return hidden states [slices, hidden], valid until the next call."""
        return self._steps[bisect_left(self._sizes, len(slices))].compute(slices, sequences)


class _RecordedStep:
    def __init__(self, model: Model, blocks: KvBlockStore, num_rows: int, record: Record) -> None:
        device, caches, states = model.place.device, blocks.layers, blocks.states.of_layers
        # No sequence has a page yet, so recording may write to the first one.
        spare = blocks.states.spare_slot
        first = RequestSlice(0, 1, BlockTable(blocks.block_size, [0], device), state_slot=spare)
        batch = AttentionBatch([first] * num_rows, device)
        # Replayed sequences may be at any position, so a sliding window must always be assumed to cut.
        batch.longest = len(caches[0].keys)
        assert batch.rows is not None
        self._rows, self._token_ids = batch.rows, torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._sequences = SequenceRows(batch.slices, device, padding_slot=spare) if states else None
        if self._sequences is not None:
            batch.sequences = self._sequences
        attention = PagedAttention()
        self._replay = record(
            lambda: model.compute(model.embed_tokens(self._token_ids), attention, caches, batch, states=states)
        )

    def compute(self, slices: Sequence[Slice], sequences: Sequence[RunningSequence]) -> Tensor:
        pairs = list(zip(slices, sequences, strict=True))
        token_ids = [token_id for pair in pairs for token_id in tokens_of(*pair)]
        self._token_ids.copy_(torch.tensor(token_ids + [0] * (len(self._token_ids) - len(token_ids))))
        pieces = [make_request_slice(piece, sequence) for piece, sequence in pairs]
        self._rows.replace(pieces)
        if self._sequences is not None:
            self._sequences.replace(pieces)
        return self._replay()[: len(slices)]
