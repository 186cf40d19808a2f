"""Slow and obvious decoder attention, with which the fast one is compared."""

import torch
from torch import Tensor

from keepsight.models.attention import AttentionBatch, LayerCache, View, attend_plainly


class ReferenceAttention:
    """Attends to every key of the request, with one mask."""

    def __call__(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        view: View,
        softcap: float | None,
    ) -> Tensor:
        outputs, lengths = [], [piece.length for piece in batch.slices]
        seen = (torch.split(each, lengths) for each in batch.visible(view))
        for piece, queries, begin, end in zip(batch.slices, torch.split(query, lengths), *seen, strict=True):
            num_keys = int(end.max())
            slots = piece.table.slots(0, num_keys)
            positions = torch.arange(num_keys)
            mask = (positions >= begin[:, None]) & (positions < end[:, None])
            outputs.append(
                attend_plainly(queries, *cache.read(slots, query.dtype), mask.to(query.device), scale, softcap)
            )
        return torch.cat(outputs) if outputs else query
