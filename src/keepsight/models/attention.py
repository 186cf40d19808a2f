"""Decoder attention over paged keys and values: its inputs, and the reference formula that defines it.

The tokens of all requests of a step are flattened into one batch. In every kind of layer (causal, windowed,
bidirectional inside a picture) a token sees *one interval* of positions of its own request. `AttentionBatch.visible`
computes it and is the only rule of visibility. The new keys and values are written to their pages first.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from keepsight.made_once import made_once
from keepsight.media import TokenSpan
from keepsight.models.adapter_weights import AdaptedRows, AdapterWeights
from keepsight.models.block_table import BlockTable
from keepsight.models.gpu_library import kernels_for
from keepsight.models.sequence_rows import SequenceRows


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """The part of one request that is computed in this step: positions [start, start + length)."""

    start: int
    length: int
    # Has pages for at least start + length positions.
    table: BlockTable
    # Pictures whose tokens attend to each other in both directions: all of the request's, or those that overlap the
    # slice. One may begin before the slice (its first keys are cached already); none may end after it.
    pictures: tuple[TokenSpan, ...] = ()
    # Subtracted from positions in the request to get rotary positions.
    rotary_shift: int = 0
    # [3, length]: time, row and column of every token; None: `rotary_shift` gives the rotary positions.
    mrope_positions: Tensor | None = None
    # The LoRA adapter applied to its tokens.
    adapter: AdapterWeights | None = None
    # Where recurrent layers keep the request's state: at its start, an empty one. Ignored if there are none.
    state_slot: int | None = None
    # Ends within the slice, or its own, and slots to which the states there are written as well.
    kept_states: Sequence[tuple[int, int]] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    def rotary_positions(self) -> Tensor:
        """Return the rotary time, row and column of each token, [3, length]."""
        if self.mrope_positions is not None:
            return self.mrope_positions
        return torch.arange(self.start - self.rotary_shift, self.end - self.rotary_shift).expand(3, -1)


class View(NamedTuple):
    """What the tokens of a layer see of their requests; by default all earlier positions and all of their picture."""

    # The number of last positions, the token's own included; None: all.
    window: int | None = None
    # Whether a picture's tokens see only earlier positions, although `RequestSlice.pictures` names it.
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The keys and values of one layer in all pages, indexed by slot: slot = block id * block size + offset."""

    keys: Tensor  # [slots, kv_heads, head_dim]
    values: Tensor  # [slots, kv_heads, head_dim]

    def read(self, slots: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if isinstance(slots, slice):
            return self.keys[slots].to(dtype), self.values[slots].to(dtype)
        # Plain indexing gives the same result but takes four times as long.
        return self.keys.index_select(0, slots).to(dtype), self.values.index_select(0, slots).to(dtype)


class DeviceRows:
    """The device-side inputs of the attention kernel for slices of one token each.

    `replace` overwrites them in place, because a captured step keeps reading the same memory.
    """

    def __init__(
        self,
        slices: Sequence[RequestSlice],
        device: torch.device,
        # Row of each slice's token in the step's batch; None: the slices are the whole batch.
        tokens: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> None:
        self.on_host = _row_inputs(slices, tokens, len(slices) if num_rows is None else num_rows)
        self._on_device = self.on_host.to(device)
        self.rotary_positions, self.positions, self.slots, *others = self._on_device.unbind()
        self.ends, self.tables, self.tokens = others

    def replace(self, slices: Sequence[RequestSlice], tokens: Sequence[int] | None = None) -> None:
        """Overwrite the rows with as many or fewer slices."""
        self._on_device.copy_(_row_inputs(slices, tokens, self._on_device.shape[1]))


# A padding row: it has no slot and sees nothing.
_PADDING_ROW = (0, 0, -1, 0, 0, 0)


def _row_inputs(slices: Sequence[RequestSlice], tokens: Sequence[int] | None, num_rows: int) -> Tensor:
    """Return [6, rows]: rotary position, position, slot, end of the visible interval, address of the sequence's slot
    table, and token index."""
    rows = list(map(_inputs_of_row, slices, range(len(slices)) if tokens is None else tokens))
    rows += [_PADDING_ROW] * (num_rows - len(rows))
    return torch.tensor(rows, dtype=torch.int64).view(-1, len(_PADDING_ROW)).T.contiguous()


def _inputs_of_row(piece: RequestSlice, token: int) -> tuple[int, int, int, int, int, int]:
    start, table = piece.start, piece.table
    return start - piece.rotary_shift, start, table.slot(start), piece.end, table.address, token


class DeviceSlices:
    """The device-side inputs of the attention kernel for slices of several tokens, each cut into blocks of rows.

    `replace` overwrites them in place.
    """

    def __init__(self, batch: "AttentionBatch", view: View, rows_per_block: int, spare_blocks: int = 0) -> None:
        self._view, self.rows_per_block = view, rows_per_block
        self.num_blocks = count_blocks(batch.slices, rows_per_block)
        self._sizes = [2 * batch.num_tokens, 3 * (self.num_blocks + spare_blocks)]
        inputs = self._flat_inputs(batch)
        begins, ends = inputs[: self._sizes[0]].view(-1, 2).unbind(1)
        # Slices of one token are excluded: they may see more.
        furthest = max(piece.end for piece in batch.slices if piece.length > 1)
        self.longest = min(furthest, int((ends - begins).max()))
        # A single copy to the device.
        self._on_device = inputs.to(batch.device)
        of_rows, of_blocks = torch.split(self._on_device, self._sizes)
        # [rows, 2]: the interval of positions that each row sees
        self.seen = of_rows.view(-1, 2)
        # [blocks, 3]: first row, number of rows, address of the sequence's slot table
        self.blocks = of_blocks.view(-1, 3)

    def replace(self, batch: "AttentionBatch") -> None:
        """Overwrite with a batch of as many rows and blocks, or fewer."""
        self._on_device.copy_(self._flat_inputs(batch))

    def _flat_inputs(self, batch: "AttentionBatch") -> Tensor:
        """Return rows and blocks, flat. Unused places are zeros: a block of no rows."""
        inputs = torch.zeros(sum(self._sizes), dtype=torch.int64)
        of_rows, of_blocks = torch.split(inputs, self._sizes)
        seen = torch.stack(batch.visible(self._view), dim=1).flatten()
        blocks = torch.tensor(_blocks_of(batch, self.rows_per_block), dtype=torch.int64).flatten()
        of_rows[: len(seen)], of_blocks[: len(blocks)] = seen, blocks
        return inputs


def count_blocks(slices: Sequence[RequestSlice], rows_per_block: int) -> int:
    return sum(-(-piece.length // rows_per_block) for piece in slices if piece.length > 1)


def _blocks_of(batch: "AttentionBatch", rows_per_block: int) -> list[tuple[int, int, int]]:
    blocks = [
        (piece.start + row, first + row, min(rows_per_block, piece.length - row), piece.table.address)
        for piece, first in zip(batch.slices, batch.slice_starts, strict=True)
        if piece.length > 1
        for row in range(0, piece.length, rows_per_block)
    ]
    # Blocks that see most go first, so that the device finishes them all at about the same time.
    blocks.sort(reverse=True)
    return [block[1:] for block in blocks]


class AttentionBatch:
    """Positions and KV slots of the tokens of one step; built once, read by every layer.

    `read`: ascending indices of the slices whose last token's hidden state is needed; no other token's is. None: the
    hidden states of all tokens are needed.
    """

    def __init__(
        self, slices: Sequence[RequestSlice], device: torch.device | str, read: Sequence[int] | None = None
    ) -> None:
        # A kernel moves the read rows to the front in place, which needs ascending order; if all are read, none move.
        assert read is None or all(one < other for one, other in itertools.pairwise(read)), read
        self.slices = tuple(slices)
        self.device = torch.device(device)
        self.num_tokens = sum(piece.length for piece in slices)
        # The largest end of all slices.
        self.longest = max((piece.end for piece in slices), default=0)
        self.num_read = self.num_tokens if read is None else len(read)
        self._read = None if self.num_read == self.num_tokens else read
        # Set if every slice is one token.
        self.rows = DeviceRows(slices, self.device) if self.num_tokens == len(slices) else None
        self.positions: Tensor  # [tokens]
        self.slots: Tensor  # [tokens]
        if self.rows is not None:
            self._positions = self.rows.on_host[1]
            self.positions, self.slots = self.rows.positions, self.rows.slots
        else:
            self._positions = torch.cat([torch.arange(piece.start, piece.end) for piece in slices])
            self.positions = self._positions.to(self.device)
            self.slots = torch.cat([piece.table.slots(piece.start, piece.end) for piece in slices]).to(self.device)

    @made_once
    def slice_starts(self) -> Sequence[int]:
        """For each slice: the index of its first token."""
        ends = itertools.accumulate(piece.length for piece in self.slices)
        return [end - piece.length for end, piece in zip(ends, self.slices, strict=True)]

    @made_once
    def rotary_positions(self) -> Tensor:
        """Rotary positions [tokens], or [3, tokens] if some tokens have a time, a row and a column."""
        if any(piece.mrope_positions is not None for piece in self.slices):
            return torch.cat([piece.rotary_positions() for piece in self.slices], dim=1).to(self.device)
        if self.rows is not None:
            return self.rows.rotary_positions
        if not any(piece.rotary_shift for piece in self.slices):
            return self.positions
        return torch.cat([piece.rotary_positions()[0] for piece in self.slices]).to(self.device)

    @made_once
    def read_rows(self) -> Tensor | None:
        """Indices of the tokens whose hidden states are needed; None: all tokens."""
        return None if self._read is None else torch.tensor(self.read_tokens, dtype=torch.int64).to(self.device)

    @made_once
    def read_part(self) -> "AttentionBatch":
        """A batch of only the read tokens: in the last layer no other token needs to attend."""
        return self if self._read is None else AttentionBatch(self.read_ends, self.device)

    @property
    def read_tokens(self) -> list[int]:
        """Indices of the last tokens of the slices that are read."""
        return [self.slice_starts[index] + self.slices[index].length - 1 for index in self._read_slices]

    @property
    def read_ends(self) -> list[RequestSlice]:
        """The same tokens as slices of length 1."""
        pieces = [self.slices[index] for index in self._read_slices]
        return [RequestSlice(piece.end - 1, 1, piece.table, adapter=piece.adapter) for piece in pieces]

    @property
    def _read_slices(self) -> Sequence[int]:
        return range(len(self.slices)) if self._read is None else self._read

    @made_once
    def adapted(self) -> Sequence[AdaptedRows]:
        """Runs of rows with a decoder adapter, in row order; adapters that change only the tower are left out."""
        if not any(piece.adapter for piece in self.slices):
            return ()
        found, row = list[AdaptedRows](), 0
        for adapter, pieces in itertools.groupby(self.slices, key=lambda piece: piece.adapter):
            end = row + sum(piece.length for piece in pieces)
            if adapter is not None and adapter.rank:
                found.append(AdaptedRows(row, end, adapter))
            row = end
        return found

    @made_once
    def sequences(self) -> SequenceRows:
        """Whose the rows are, for recurrent layers."""
        return SequenceRows(self.slices, self.device)

    @made_once
    def single_rows(self) -> DeviceRows | None:
        """Kernel inputs of the one-token slices among longer ones; None if there are none."""
        pieces, tokens = self.singles
        # Padded to an even number: Triton compiles a kernel again if the alignment of a pointer argument changes.
        return DeviceRows(pieces, self.device, tokens, len(pieces) + len(pieces) % 2) if pieces else None

    @made_once
    def singles(self) -> tuple[list[RequestSlice], list[int]]:
        """The slices of one token, and the indices of those tokens."""
        pairs = zip(self.slices, self.slice_starts, strict=True)
        found = [(piece, first) for piece, first in pairs if piece.length == 1]
        return [piece for piece, _ in found], [first for _, first in found]

    def longer_slices(self, view: View, rows_per_block: int) -> DeviceSlices:
        """Kernel inputs of the slices of several tokens."""
        return DeviceSlices(self, view, rows_per_block)

    def simplest(self, view: View) -> View:
        """Return the view without a window that is so wide that it hides nothing."""
        return view._replace(window=None) if view.window is not None and view.window >= self.longest else view

    @made_once
    def _picture_ends(self) -> Tensor:
        """For each token: the end of the picture that contains it; 0 outside pictures."""
        ends = torch.zeros(self.num_tokens, dtype=torch.int64)
        for piece, row in zip(self.slices, self.slice_starts, strict=True):
            before = row - piece.start
            for span in piece.pictures:
                assert not span.is_cut_by(piece.end), (span, piece.end)
                ends[max(row, before + span.start) : max(row, before + span.end)] = span.end
        return ends

    def visible(self, view: View, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return, for each token, the interval [begin, end) of positions of its request that it sees. On the host."""
        positions, window = self._positions[rows], view.window
        begin = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
        end = positions + 1
        return begin, end if view.is_causal else torch.maximum(end, self._picture_ends[rows])


class Attention(Protocol):
    def __call__(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        view: View,
        softcap: float | None,
    ) -> Tensor: ...  # [tokens, heads, head_dim]


def write_cache(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Write keys [tokens, kv_heads, head_dim] and values. Where there are kernels, padding has negative slots."""
    if (kernels := kernels_for(key.device)) is not None:
        kernels.write_heads(key.contiguous(), value.contiguous(), cache.keys, cache.values, slots)
        return
    cache.keys.index_copy_(0, slots, key.to(cache.keys.dtype))
    cache.values.index_copy_(0, slots, value.to(cache.values.dtype))


def attend_plainly(
    query: Tensor,  # [queries, heads, head_dim]
    keys: Tensor,  # [keys, kv_heads, head_dim]
    values: Tensor,
    mask: Tensor | None,  # [queries, keys], True where seen; None: all
    scale: float,
    softcap: float | None,
) -> Tensor:
    """The formula written out, with softmax in float32 as in the reference implementation."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("hqk,khd->qhd", weights, values)
