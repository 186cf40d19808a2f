"""The fast attention: each group of queries reads only the keys that it can see.

On a CPU one kernel computes all rows of a step and reads keys from their pages in place. On a GPU one kernel computes
all slices of one token, whose results depend on nothing else in the step, and another all longer slices. Without these
kernels torch's fused attention is used. Long slices are then cut into groups of rows, so that a prompt does not pay
for keys hidden by its window or by causality. Slices of one token read their keys in place, one call per slice; where
copying the keys of several into one block is cheaper than separate calls (contexts that are not very long on a CPU, as
many as fit on a GPU), they are computed together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Size, Tensor
from torch.nn.utils.rnn import pad_sequence

from keepsight.models.attention import AttentionBatch, DeviceRows, DeviceSlices, LayerCache, View, attend_plainly
from keepsight.models.cpu_kernels import Sight, can_attend
from keepsight.models.gpu_library import GpuKernels, kernels_for

# Large enough for torch's kernels to run at full rate, small enough to skip most of what causality hides.
ROWS_PER_GROUP = 512
# On a CPU: the largest keys and values of one sequence to copy (copying more takes longer than a separate call), and
# the most sequences to compute together (a larger block is evicted from the CPU's cache before it is read).
MAX_BYTES_TO_COPY, MAX_TOKENS_TOGETHER = 2**20, 8
# On a GPU: the limit on all keys and values copied at once, padding to the longest included. Padding many short
# contexts to one of a hundred thousand positions would exceed the device's memory.
MAX_BYTES_TOGETHER = 512 * 2**20


def use_kernels_of_any_length() -> None:
    """Disable cuDNN attention, which torch prefers on some GPUs, for the whole process.

    cuDNN builds a new plan for each number of keys (taking tens of milliseconds, its users report), and every token
    adds one key.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


class _Part(Protocol):
    """Some rows of the batch, by default all of them, and the location of their keys and values."""

    __slots__ = ()

    @property
    def rows(self) -> slice | Tensor:
        return slice(None)

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        """Return the outputs of these rows from their queries, each [rows, heads, head_dim]."""
        ...


class PagedAttention:
    def __init__(self) -> None:
        # Layers with the same view and heads share a step's plan, which is dropped when the next batch comes.
        self._planned_for: AttentionBatch | None = None
        self._plans: dict[tuple[View, Size, Size, bool], Sequence[_Part]] = {}

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
        if self._planned_for is not batch:
            self._planned_for, self._plans = batch, {}
        view = batch.simplest(view)
        key = view, query.shape[1:], cache.keys.shape[1:], softcap is None
        if key not in self._plans:
            if kernels := kernels_for(query.device):
                self._plans[key] = [plan_on_device(batch, view, kernels, kernels.rows_per_block(query, cache.keys))]
            else:
                self._plans[key] = plan(batch, view, _FallbackLimits.of(query, cache, softcap))
        parts = self._plans[key]
        if len(parts) == 1:
            return parts[0].attend(query, cache, scale, softcap)
        output = torch.empty_like(query)
        for part in parts:
            output[part.rows] = part.attend(query[part.rows], cache, scale, softcap)
        return output


class _FallbackLimits(NamedTuple):
    """How attention is computed without our GPU kernels."""

    by_kernel: bool
    dtype: torch.dtype
    # Limits for computing sequences together: keys of one sequence (0: never together), sequences, and keys of all of
    # them including padding.
    max_keys_to_copy: int
    max_tokens_together: int
    max_keys_together: int

    @classmethod
    def of(cls, query: Tensor, cache: LayerCache, softcap: float | None) -> Self:
        if softcap is not None:
            return cls(False, query.dtype, 0, 1, 0)
        bytes_per_key = 2 * cache.keys[0].nbytes
        if query.device.type != "cpu":
            max_keys = MAX_BYTES_TOGETHER // bytes_per_key
            return cls(False, query.dtype, max_keys, len(query), max_keys)
        by_kernel = can_attend(query, cache.keys.shape[1])
        max_keys = MAX_BYTES_TO_COPY // bytes_per_key
        return cls(by_kernel, query.dtype, max_keys, MAX_TOKENS_TOGETHER, MAX_TOKENS_TOGETHER * max_keys)


def plan(batch: AttentionBatch, view: View, limits: _FallbackLimits) -> list[_Part]:
    if limits.by_kernel:
        return [_AllRows(sight_of(batch, view))]
    parts: list[_Part] = []
    # Slice index -> row, for slices of one token.
    singles: dict[int, int] = {}
    for index, (piece, row) in enumerate(zip(batch.slices, batch.slice_starts, strict=True)):
        if piece.length > 1:
            parts += plan_rows(batch, index, row, view, ROWS_PER_GROUP)
        else:
            singles[index] = row
    return parts + plan_tokens(batch, singles, view.window, limits)


# All rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AllRows(_Part):
    sight: Sight

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        assert softcap is None
        return self.sight.attend(query, cache.keys, cache.values, scale)


def sight_of(batch: AttentionBatch, view: View) -> Sight:
    lengths = [piece.length for piece in batch.slices]
    return Sight(lengths, [piece.table.slots(0, piece.end) for piece in batch.slices], *batch.visible(view))


# One token ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Token:
    """One row, which sees all keys [begin, end) of its request and so needs no mask."""

    index: int
    row: int
    begin: int
    end: int
    slots: slice | Tensor

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + 1)

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        keys, values = cache.read(self.slots, query.dtype)
        if softcap is not None:
            return attend_plainly(query, keys, values, None, scale, softcap)
        queries = _heads_as_queries(query, keys.shape[1])
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        return attended.reshape(query.shape)


def plan_tokens(
    batch: AttentionBatch, singles: Mapping[int, int], window: int | None, limits: _FallbackLimits
) -> list[_Part]:
    parts: list[_Part] = []
    together: list[_Token] = []
    for index, row in singles.items():
        token = _token(batch, index, row, window)
        (together if token.end - token.begin <= limits.max_keys_to_copy else parts).append(token)
    groups = _groups(together, limits)
    return parts + [some[0] if len(some) == 1 else _tokens_together(some, batch, limits.dtype) for some in groups]


def _token(batch: AttentionBatch, index: int, row: int, window: int | None) -> _Token:
    piece = batch.slices[index]
    begin = 0 if window is None else max(0, piece.end - window)
    # Even if the token belongs to a picture, the picture ends with it.
    assert all(span.end <= piece.end for span in piece.pictures), piece
    return _Token(index, row, begin, piece.end, _slot_index(batch, index, begin, piece.end))


def _heads_as_queries(query: Tensor, num_kv_heads: int) -> Tensor:
    """[rows, heads, head_dim] -> [rows, kv_heads, group, head_dim]: heads that share a key head read it once."""
    rows, num_heads, head_dim = query.shape
    return query.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Rows of one token each, whose keys are copied into one block, padded to the longest."""

    rows: slice | Tensor
    slots: Tensor  # [rows, keys]
    mask: Tensor | None  # [rows, 1, 1, keys]: 0 where visible, else minus infinity

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        num_kv_heads = cache.keys.shape[1]
        flat = self.slots.flatten()
        keys, values = (
            tensor.view(*self.slots.shape, num_kv_heads, -1).transpose(1, 2) for tensor in cache.read(flat, query.dtype)
        )
        attended = F.scaled_dot_product_attention(
            _heads_as_queries(query, num_kv_heads), keys, values, attn_mask=self.mask, scale=scale
        )
        return attended.reshape(query.shape)


def _groups(tokens: Sequence[_Token], limits: _FallbackLimits) -> Iterator[list[_Token]]:
    """Yield groups of tokens to compute together."""
    group: list[_Token] = []
    longest = 0
    for token in tokens:
        longest = max(longest, token.end - token.begin)
        if len(group) == limits.max_tokens_together or (len(group) + 1) * longest > limits.max_keys_together:
            yield group
            group, longest = [], token.end - token.begin
        group.append(token)
    if group:
        yield group


def _tokens_together(tokens: Sequence[_Token], batch: AttentionBatch, dtype: torch.dtype) -> _Tokens:
    slots = pad_sequence(
        [batch.slices[each.index].table.slots(each.begin, each.end) for each in tokens],
        batch_first=True,
        padding_value=-1,
    )
    mask = None
    if min(each.end - each.begin for each in tokens) < slots.shape[1]:
        is_padding = slots < 0
        # Padding must point at a slot that was written: a NaN would spread even if masked.
        slots = torch.where(is_padding, slots[:, :1], slots)
        mask = torch.zeros(slots.shape, dtype=dtype, device=slots.device).masked_fill_(is_padding, float("-inf"))
        mask = mask[:, None, None]
    return _Tokens(_in_a_row(torch.tensor([each.row for each in tokens]), slots.device), slots, mask)


def _in_a_row(rows: Tensor, device: torch.device) -> slice | Tensor:
    """Return a slice if these ascending rows are contiguous, which avoids a copy; otherwise an index tensor."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows.to(device)


# GPU kernels --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RowsOnDevice(_Part):
    """A batch of slices of one token each."""

    inputs: DeviceRows
    window: int | None
    kernels: GpuKernels

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        output = torch.empty_like(query)
        of_rows = (self.inputs.tables, self.inputs.ends, None)
        self.kernels.attend_rows(output, query, cache.keys, cache.values, *of_rows, scale, self.window, softcap)
        return output


@dataclass(frozen=True, slots=True)
class _SlicesOnDevice(_Part):
    """A batch with slices of several tokens, and perhaps some of one token."""

    longer: DeviceSlices
    singles: DeviceRows | None
    window: int | None
    kernels: GpuKernels

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        output = torch.empty_like(query)
        of_slices = (self.longer.seen, self.longer.blocks, self.longer.num_blocks, self.longer.longest)
        self.kernels.attend_slices(output, query, cache.keys, cache.values, *of_slices, scale, softcap)
        if self.singles is not None:
            of_singles = (self.singles.tables, self.singles.ends, self.singles.tokens)
            self.kernels.attend_rows(output, query, cache.keys, cache.values, *of_singles, scale, self.window, softcap)
        return output


def plan_on_device(batch: AttentionBatch, view: View, kernels: GpuKernels, rows_per_block: int) -> _Part:
    if batch.rows is not None:
        return _RowsOnDevice(batch.rows, view.window, kernels)
    return _SlicesOnDevice(batch.longer_slices(view, rows_per_block), batch.single_rows, view.window, kernels)


# Several tokens -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one slice, and the keys [begin, end) of its request that at least one of them sees."""

    rows: slice
    begin: int
    end: int
    slots: slice | Tensor
    # [rows, end - begin]: True where visible; None: everywhere.
    mask: Tensor | None

    def attend(self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None) -> Tensor:
        keys, values = cache.read(self.slots, query.dtype)
        if softcap is not None:
            return attend_plainly(query, keys, values, self.mask, scale, softcap)
        return _attend_fused(query, keys, values, self.mask, scale)


def plan_rows(batch: AttentionBatch, index: int, first_row: int, view: View, rows_per_group: int) -> list[RowGroup]:
    """Cut one slice, whose first token is row `first_row` of the batch, into groups of rows."""
    last_row = first_row + batch.slices[index].length
    firsts = range(first_row, last_row, rows_per_group)
    return [_row_group(batch, index, slice(first, min(first + rows_per_group, last_row)), view) for first in firsts]


def _row_group(batch: AttentionBatch, index: int, rows: slice, view: View) -> RowGroup:
    begins, ends = batch.visible(view, rows)
    begin, end = int(begins.min()), int(ends.max())
    mask = None
    if int(begins.max()) > begin or int(ends.min()) < end:
        # Built on the device: for a long context the mask is far larger than its inputs.
        keys = torch.arange(begin, end, device=batch.device)
        begins, ends = begins.to(batch.device), ends.to(batch.device)
        mask = (keys >= begins[:, None]) & (keys < ends[:, None])
    return RowGroup(rows, begin, end, _slot_index(batch, index, begin, end), mask)


def _slot_index(batch: AttentionBatch, index: int, begin: int, end: int) -> slice | Tensor:
    """Return the slots of positions [begin, end) as a slice if contiguous, which avoids a copy; otherwise a tensor."""
    table = batch.slices[index].table
    run = table.run(begin, end)
    return table.slots(begin, end) if run is None else run


def _attend_fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    # A key head serves `group` query heads: a batch dimension with stride 0 shares it without a copy. If it were the
    # head dimension, the last row of 65, or of 129, would be wrong on a GPU (pytorch/pytorch#191937).
    grouped = query.reshape(num_queries, num_kv_heads, group, head_dim).permute(2, 1, 0, 3)
    shared = (group, num_kv_heads, keys.shape[0], head_dim)
    keys, values = keys.transpose(0, 1).expand(shared), values.transpose(0, 1).expand(shared)
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return output.permute(2, 1, 0, 3).reshape(num_queries, num_heads, head_dim)
