"""The fast attention: torch's fused kernels over just the keys that a group of queries can see.

Queries are cut into groups of rows, so that a long prompt never pays for the keys its window or causality hides.
Nothing is copied where pages happen to lie in a row, or where a request is computed from its first token on.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.attention import AttentionBatch, LayerCache, attend_plainly, write_cache

# Large enough for the kernels to run at full rate, small enough to skip most of what causality hides.
ROWS_PER_GROUP = 512


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Rows [first, first + count) of the batch, and the keys [begin, end) of their request that they see."""

    request: int
    first: int
    count: int
    begin: int
    end: int
    # [count, end - begin]: True where seen; None where every row sees every key.
    mask: Tensor | None


class PagedAttention:
    def __init__(self) -> None:
        # All layers of one window share the plan of a step; it is dropped with the next step's batch.
        self._planned_for: AttentionBatch | None = None
        self._plans: dict[int | None, list[_RowGroup]] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        write_cache(key, value, cache, batch)
        output = torch.empty_like(query)
        for group in self._plan(batch, window):
            rows = slice(group.first, group.first + group.count)
            slots = _slot_index(batch, group)
            keys, values = cache.keys[slots], cache.values[slots]
            if softcap is None:
                output[rows] = _attend_fused(query[rows], keys, values, group.mask, scale)
            else:
                output[rows] = attend_plainly(query[rows], keys, values, group.mask, scale, softcap)
        return output

    def _plan(self, batch: AttentionBatch, window: int | None) -> list[_RowGroup]:
        if self._planned_for is not batch:
            self._planned_for, self._plans = batch, {}
        if window not in self._plans:
            self._plans[window] = plan_rows(batch, window)
        return self._plans[window]


def plan_rows(batch: AttentionBatch, window: int | None, rows_per_group: int = ROWS_PER_GROUP) -> list[_RowGroup]:
    groups = []
    first = 0
    for index, piece in enumerate(batch.slices):
        begins, ends = batch.visible(index, window)
        for offset in range(0, piece.length, rows_per_group):
            begin, end = begins[offset : offset + rows_per_group], ends[offset : offset + rows_per_group]
            groups.append(_row_group(index, first + offset, begin, end, batch.device))
        first += piece.length
    return groups


def _row_group(request: int, first: int, begins: Tensor, ends: Tensor, device: torch.device) -> _RowGroup:
    begin, end = int(begins.min()), int(ends.max())
    mask = None
    if int(begins.max()) > begin or int(ends.min()) < end:
        keys = torch.arange(begin, end)
        mask = ((keys >= begins[:, None]) & (keys < ends[:, None])).to(device)
    return _RowGroup(request, first, len(begins), begin, end, mask)


def _slot_index(batch: AttentionBatch, group: _RowGroup) -> slice | Tensor:
    """A slice where the pages lie in a row: reading through it copies nothing."""
    table = batch.slices[group.request].table
    runs = table.runs(group.begin, group.end, max_runs=1)
    return table.slots(group.begin, group.end) if runs is None else runs[0]


def _attend_fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    # A key head serves `group` query heads: as a batch dimension with stride 0 it is shared, not repeated.
    grouped = query.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    shared = (num_kv_heads, group, keys.shape[0], head_dim)
    output = F.scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1).unsqueeze(1).expand(shared),
        values.transpose(0, 1).unsqueeze(1).expand(shared),
        attn_mask=mask,
        scale=scale,
    )
    return output.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
