"""The fast attention: over just the keys that a group of queries can see, by torch's fused kernels or, in float32 on a
CPU, by two products.

Long slices are cut into groups of rows, so that a prompt never pays for the keys its window or causality hides.  Slices
of one token read their keys where they lie, each in turn; where copying the keys of several into one block costs less
than their turns (not very long contexts on a CPU, any on a GPU) they are attended to together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from keepsight.models.attention import AttentionBatch, LayerCache, attend_plainly
from keepsight.models.cpu_products import is_exact_on_cpu

# Large enough for the kernels to run at full rate, small enough to skip most of what causality hides; and for products
# few enough that a group's scores stay in the cache.
ROWS_PER_GROUP, ROWS_BY_PRODUCTS = 512, 128
# Of one sequence's keys and values: on a CPU copying more takes longer than a call of its own.  And of so many
# sequences at once: a block of more leaves the cache before it is read.
MAX_BYTES_TO_COPY, MAX_TOKENS_TOGETHER = 2**20, 8


class _Part(Protocol):
    """Some rows of the batch, and where their keys and values lie."""

    @property
    def rows(self) -> slice | Tensor: ...

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        """Queries of these rows -> outputs of these rows, each [rows, heads, head_dim]"""
        ...


class PagedAttention:
    def __init__(self) -> None:
        # All layers of one window share the plan of a step; it is dropped with the next step's batch.
        self._planned_for: AttentionBatch | None = None
        self._plans: dict[int | None, Sequence[_Part]] = {}

    def __call__(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        if self._planned_for is not batch:
            self._planned_for, self._plans = batch, {}
        if window is not None and window >= batch.longest:
            window = None
        if window not in self._plans:
            self._plans[window] = plan(batch, window, _Way.of(query, cache, softcap))
        parts = self._plans[window]
        if len(parts) == 1:
            return parts[0].attend(query, cache, scale, softcap)
        output = torch.empty_like(query)
        for part in parts:
            output[part.rows] = part.attend(query[part.rows], cache, scale, softcap)
        return output


class _Way(NamedTuple):
    """How the rows of a step are attended to, which is the same for all layers."""

    dtype: torch.dtype
    # So many query heads share a key head.
    group: int
    # Of one sequence, to attend to it together with others, 0: never; and with how many.
    max_keys_to_copy: int
    max_tokens_together: int
    by_products: bool

    @classmethod
    def of(cls, query: Tensor, cache: LayerCache, softcap: float | None) -> Self:
        group = query.shape[1] // cache.keys.shape[1]
        if softcap is not None:
            return cls(query.dtype, group, 0, 1, by_products=False)
        if query.device.type != "cpu":
            return cls(query.dtype, group, cache.keys.shape[0], max(1, len(query)), by_products=False)
        max_keys = MAX_BYTES_TO_COPY // (2 * cache.keys[0].nbytes)
        return cls(query.dtype, group, max_keys, MAX_TOKENS_TOGETHER, is_exact_on_cpu(query))


def plan(batch: AttentionBatch, window: int | None, way: _Way) -> list[_Part]:
    parts: list[_Part] = []
    together: list[_Token] = []
    row = 0
    for index, piece in enumerate(batch.slices):
        if piece.length > 1:
            groups = plan_rows(batch, index, row, window, ROWS_BY_PRODUCTS if way.by_products else ROWS_PER_GROUP)
            parts += [_by_products(each, way.group) if way.by_products else _fused(each, batch) for each in groups]
        else:
            token = _token(batch, index, row, window)
            (together if token.end - token.begin <= way.max_keys_to_copy else parts).append(token)
        row += piece.length
    for first in range(0, len(together), way.max_tokens_together):
        some = together[first : first + way.max_tokens_together]
        parts.append(some[0] if len(some) == 1 else _tokens_together(some, batch, way.dtype))
    return parts


# One token ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Token:
    """One row, which sees all of the keys [begin, end) of its request: no mask."""

    index: int
    row: int
    begin: int
    end: int
    slots: slice | Tensor

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + 1)

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        keys, values = _read(cache, self.slots)
        if softcap is not None:
            return attend_plainly(query, keys, values, None, scale, softcap)
        attended = F.scaled_dot_product_attention(
            _heads_as_queries(query, keys.shape[1]),
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            scale=scale,
        )
        return attended.view(query.shape)


def _token(batch: AttentionBatch, index: int, row: int, window: int | None) -> _Token:
    piece = batch.slices[index]
    begin = 0 if window is None else max(0, piece.end - window)
    # Of a picture of one token, too, nothing lies behind the token.
    assert all(span.end <= piece.end for span in piece.pictures), piece
    return _Token(index, row, begin, piece.end, _slot_index(batch, index, begin, piece.end))


def _heads_as_queries(query: Tensor, num_kv_heads: int) -> Tensor:
    """[rows, heads, head_dim] -> [rows, kv_heads, group, head_dim]: what shares a key head reads it once."""
    rows, num_heads, head_dim = query.shape
    return query.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Rows of one token each, their keys copied side by side and padded to the longest."""

    rows: slice | Tensor
    slots: Tensor  # [rows, keys]
    mask: Tensor | None  # [rows, 1, 1, keys]: 0 where seen, else minus infinity

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        num_kv_heads = cache.keys.shape[1]
        flat = self.slots.flatten()
        keys, values = (
            tensor.view(*self.slots.shape, num_kv_heads, -1).transpose(1, 2) for tensor in _read(cache, flat)
        )
        attended = F.scaled_dot_product_attention(
            _heads_as_queries(query, num_kv_heads), keys, values, attn_mask=self.mask, scale=scale
        )
        return attended.reshape(query.shape)


def _tokens_together(tokens: Sequence[_Token], batch: AttentionBatch, dtype: torch.dtype) -> _Tokens:
    slots = pad_sequence(
        [batch.slices[each.index].table.slots(each.begin, each.end) for each in tokens],
        batch_first=True,
        padding_value=-1,
    )
    mask = None
    if min(each.end - each.begin for each in tokens) < slots.shape[1]:
        is_padding = slots < 0
        # Whatever is read, masked or not, must have been written: any NaN would spread.
        slots = torch.where(is_padding, slots[:, :1], slots)
        mask = torch.zeros(slots.shape, dtype=dtype, device=slots.device).masked_fill_(is_padding, float("-inf"))
        mask = mask[:, None, None]
    rows: slice | Tensor = slice(tokens[0].row, tokens[-1].row + 1)
    if tokens[-1].row - tokens[0].row + 1 != len(tokens):
        rows = torch.tensor([each.row for each in tokens], device=slots.device)
    return _Tokens(rows, slots, mask)


# Several tokens -----------------------------------------------------------------------------------------------


class RowGroup(NamedTuple):
    """Rows of one slice, and the keys [begin, end) of their request that any of them sees."""

    rows: slice
    begin: int
    end: int
    slots: slice | Tensor
    # [rows, end - begin]: True where not seen, on the host; None where every row sees every key.
    unseen: Tensor | None


def plan_rows(
    batch: AttentionBatch, index: int, first_row: int, window: int | None, rows_per_group: int
) -> list[RowGroup]:
    """Of one slice, whose first token is the batch's `first_row`."""
    begins, ends = batch.visible(index, window)
    groups = []
    for offset in range(0, len(begins), rows_per_group):
        own = slice(offset, offset + rows_per_group)
        groups.append(_row_group(batch, index, first_row + offset, begins[own], ends[own]))
    return groups


def _row_group(batch: AttentionBatch, index: int, first: int, begins: Tensor, ends: Tensor) -> RowGroup:
    begin, end = int(begins.min()), int(ends.max())
    is_cut_before, is_cut_behind = int(begins.max()) > begin, int(ends.min()) < end
    unseen = None
    if is_cut_before or is_cut_behind:
        keys = torch.arange(begin, end)
        unseen = keys >= ends[:, None]
        if is_cut_before:
            unseen |= keys < begins[:, None]
    rows = slice(first, first + len(begins))
    return RowGroup(rows, begin, end, _slot_index(batch, index, begin, end), unseen)


@dataclass(frozen=True, slots=True)
class _FusedRows:
    rows: slice
    slots: slice | Tensor
    # [rows, keys]: True where seen; None: everywhere.
    mask: Tensor | None

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        keys, values = _read(cache, self.slots)
        if softcap is not None:
            return attend_plainly(query, keys, values, self.mask, scale, softcap)
        return _attend_fused(query, keys, values, self.mask, scale)


def _fused(group: RowGroup, batch: AttentionBatch) -> _FusedRows:
    mask = None if group.unseen is None else (~group.unseen).to(batch.device)
    return _FusedRows(group.rows, group.slots, mask)


def _slot_index(batch: AttentionBatch, index: int, begin: int, end: int) -> slice | Tensor:
    """A slice where the pages lie in a row: reading through it copies nothing."""
    table = batch.slices[index].table
    run = table.run(begin, end)
    return table.slots(begin, end) if run is None else run


def _read(cache: LayerCache, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(slots, slice):
        return cache.keys[slots], cache.values[slots]
    # Indexing would give the same and take four times as long.
    return cache.keys.index_select(0, slots), cache.values.index_select(0, slots)


def _attend_fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    # A key head serves `group` query heads: as a batch dimension with stride 0 it is shared, not repeated.
    grouped = query.reshape(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    shared = (num_kv_heads, group, keys.shape[0], head_dim)
    output = F.scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1).unsqueeze(1).expand(shared),
        values.transpose(0, 1).unsqueeze(1).expand(shared),
        attn_mask=mask,
        scale=scale,
    )
    return output.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


@dataclass(frozen=True, slots=True)
class _RowsByProducts:
    """The same by two products, in half to three quarters of the kernel's time."""

    rows: slice
    slots: slice | Tensor
    # [rows * group, keys]: 0 where seen, else minus infinity; a query head follows the other within its row.
    mask: Tensor | None

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        keys, values = _read(cache, self.slots)
        grouped = _heads_as_queries(query, keys.shape[1]).transpose(0, 1)
        kv_heads, count, group, head_dim = grouped.shape
        flat = grouped.reshape(kv_heads, count * group, head_dim)
        if self.mask is None:
            scores = torch.bmm(flat * scale, keys.permute(1, 2, 0))
        else:
            scores = torch.baddbmm(self.mask, flat, keys.permute(1, 2, 0), alpha=scale)
        attended = torch.bmm(scores.softmax(dim=-1), values.transpose(0, 1)).view(grouped.shape)
        return attended.transpose(0, 1).reshape(query.shape)


def _by_products(group: RowGroup, heads_per_key: int) -> _RowsByProducts:
    mask = None
    if (unseen := group.unseen) is not None:
        mask = torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf")).repeat_interleave(heads_per_key, dim=0)
    return _RowsByProducts(group.rows, group.slots, mask)
