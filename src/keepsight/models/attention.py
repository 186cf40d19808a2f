"""Decoder attention over paged keys and values: what it is told, and the plain formula that defines it.

The tokens of all requests of a step lie flat in one batch.  Whatever the layer (causal, windowed, two-way inside a
picture), a token sees *one interval* of positions of its own request: `AttentionBatch.visible` computes it, and it is
the only rule of visibility.  The new keys and values are written to their pages first.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from keepsight.made_once import made_once
from keepsight.media import TokenSpan
from keepsight.models.adapter_weights import AdaptedRows, AdapterWeights
from keepsight.models.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """The part of one request that is computed in this step: positions [start, start + length)."""

    start: int
    length: int
    # Pages enough for start + length positions.
    table: BlockTable
    # Whose tokens see each other in both directions: the request's pictures, or those that overlap the slice.  One may
    # begin before it (its first keys are held already), none may end after it.
    pictures: tuple[TokenSpan, ...] = ()
    # By how many positions its tokens stand nearer to the beginning for a decoder's rotation than in the request.
    rotary_shift: int = 0
    # Where some stand at a time, a row and a column: [3, length], of all of them.
    rotary_places: Tensor | None = None
    # What is laid over the model's weights for its tokens.
    adapter: AdapterWeights | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    def rotary_positions(self) -> Tensor:
        """[3, length]"""
        if self.rotary_places is not None:
            return self.rotary_places
        return torch.arange(self.start - self.rotary_shift, self.end - self.rotary_shift).expand(3, -1)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values of all pages, seen as slots: slot = block id * block size + offset."""

    keys: Tensor  # [slots, kv_heads, head_dim]
    values: Tensor  # [slots, kv_heads, head_dim]

    def read(self, slots: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if isinstance(slots, slice):
            return self.keys[slots].to(dtype), self.values[slots].to(dtype)
        # Indexing would give the same and take four times as long.
        return self.keys.index_select(0, slots).to(dtype), self.values.index_select(0, slots).to(dtype)


class DeviceRows:
    """What a kernel on the device reads of slices of one token each.

    Others may take their places in the same memory, which is what a captured step goes on reading.
    """

    def __init__(
        self,
        slices: Sequence[RequestSlice],
        device: torch.device,
        # Which of the step's tokens each is; None: they are all there are.
        tokens: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> None:
        self.on_host = _tell_rows(slices, tokens, len(slices) if num_rows is None else num_rows)
        self._on_device = self.on_host.to(device)
        self.rotary_positions, self.positions, self.slots, *others = self._on_device.unbind()
        self.ends, self.tables, self.tokens = others

    def replace(self, slices: Sequence[RequestSlice], tokens: Sequence[int] | None = None) -> None:
        """By as many or fewer."""
        self._on_device.copy_(_tell_rows(slices, tokens, self._on_device.shape[1]))


# Of a row that is nobody's: it has no slot and sees nothing.
_NOBODY = (0, 0, -1, 0, 0, 0)


def _tell_rows(slices: Sequence[RequestSlice], tokens: Sequence[int] | None, num_rows: int) -> Tensor:
    """[6, rows]: positions, as rotation and as others count them, their slots, where what they see ends, where the
    slots of that are listed, and which tokens they are."""
    rows = list(map(_tell_row, slices, range(len(slices)) if tokens is None else tokens))
    rows += [_NOBODY] * (num_rows - len(rows))
    return torch.tensor(rows, dtype=torch.int64).view(-1, len(_NOBODY)).T.contiguous()


def _tell_row(piece: RequestSlice, token: int) -> tuple[int, int, int, int, int, int]:
    start, table = piece.start, piece.table
    return start - piece.rotary_shift, start, table.slot(start), piece.end, table.address, token


class DeviceSlices:
    """What a kernel on the device reads of slices of several tokens: blocks of some rows, each of one slice.

    Others may take their places in the same memory.
    """

    def __init__(self, batch: "AttentionBatch", window: int | None, rows_per_block: int, spare_blocks: int = 0) -> None:
        self._window, self.rows_per_block = window, rows_per_block
        self.num_blocks = count_blocks(batch.slices, rows_per_block)
        self._sizes = [2 * batch.num_tokens, 3 * (self.num_blocks + spare_blocks)]
        told = self._tell(batch)
        begins, ends = told[: self._sizes[0]].view(-1, 2).unbind(1)
        # Single tokens among them may see more.
        furthest = max(piece.end for piece in batch.slices if piece.length > 1)
        self.longest = min(furthest, int((ends - begins).max()))
        # In one copy.
        self._on_device = told.to(batch.device)
        of_rows, of_blocks = torch.split(self._on_device, self._sizes)
        # [rows, 2]: the interval of positions that each sees
        self.seen = of_rows.view(-1, 2)
        # [blocks, 3]: its first of these rows, how many, where the slots of their sequence are listed
        self.blocks = of_blocks.view(-1, 3)

    def replace(self, batch: "AttentionBatch") -> None:
        """By as many rows and blocks, or fewer."""
        self._on_device.copy_(self._tell(batch))

    def _tell(self, batch: "AttentionBatch") -> Tensor:
        """Where nobody's are, zeros: a block of no rows."""
        told = torch.zeros(sum(self._sizes), dtype=torch.int64)
        of_rows, of_blocks = torch.split(told, self._sizes)
        seen = torch.stack(batch.visible(self._window), dim=1).flatten()
        blocks = torch.tensor(_blocks_of(batch.slices, self.rows_per_block), dtype=torch.int64).flatten()
        of_rows[: len(seen)], of_blocks[: len(blocks)] = seen, blocks
        return told


def count_blocks(slices: Sequence[RequestSlice], rows_per_block: int) -> int:
    return sum(-(-piece.length // rows_per_block) for piece in slices if piece.length > 1)


def _blocks_of(slices: Sequence[RequestSlice], rows_per_block: int) -> list[tuple[int, int, int]]:
    firsts = itertools.accumulate((piece.length for piece in slices), initial=0)
    blocks = [
        (piece.start + row, first + row, min(rows_per_block, piece.length - row), piece.table.address)
        for piece, first in zip(slices, firsts, strict=False)
        if piece.length > 1
        for row in range(0, piece.length, rows_per_block)
    ]
    # Those that see most go first: then a device ends them all at about the same time.
    blocks.sort(reverse=True)
    return [block[1:] for block in blocks]


class AttentionBatch:
    """Where the tokens of one step stand and where their keys and values live; made once, read by every layer.

    `read`: of these slices, ascending, the hidden state of the last token is wanted, and of no other token; None: of
    all tokens.
    """

    def __init__(
        self, slices: Sequence[RequestSlice], device: torch.device | str, read: Sequence[int] | None = None
    ) -> None:
        # A kernel brings their rows to the front in place; where all are read, nobody asks in which order.
        assert read is None or all(one < other for one, other in itertools.pairwise(read)), read
        self.slices = tuple(slices)
        self.device = torch.device(device)
        self.num_tokens = sum(piece.length for piece in slices)
        # Where the last of all requests' positions ends.
        self.longest = max((piece.end for piece in slices), default=0)
        self.num_read = self.num_tokens if read is None else len(read)
        self._read = None if self.num_read == self.num_tokens else read
        # Where every slice is one token.
        self.rows = DeviceRows(slices, self.device) if self.num_tokens == len(slices) else None
        # In a recorded step others take their places, or fewer: what is left is nobody's, and has no slot.
        self.may_have_nobody = self.rows is not None
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
    def rotary_positions(self) -> Tensor:
        """[tokens]; [3, tokens] where some have a time, a row and a column."""
        if any(piece.rotary_places is not None for piece in self.slices):
            return torch.cat([piece.rotary_positions() for piece in self.slices], dim=1).to(self.device)
        if self.rows is not None:
            return self.rows.rotary_positions
        if not any(piece.rotary_shift for piece in self.slices):
            return self.positions
        return torch.cat([piece.rotary_positions()[0] for piece in self.slices]).to(self.device)

    @made_once
    def read_rows(self) -> Tensor | None:
        """Where among all tokens those stand whose hidden state is wanted; None: everywhere."""
        return None if self._read is None else torch.tensor(self.read_tokens, dtype=torch.int64).to(self.device)

    @made_once
    def read_part(self) -> "AttentionBatch":
        """Those tokens alone: nobody else needs to attend in the last layer."""
        return self if self._read is None else AttentionBatch(self.read_ends, self.device)

    @property
    def read_tokens(self) -> list[int]:
        """Which tokens those are, where the ends of slices are read."""
        ends = list(itertools.accumulate(piece.length for piece in self.slices))
        return [ends[index] - 1 for index in self._read_slices]

    @property
    def read_ends(self) -> list[RequestSlice]:
        """The same as slices."""
        pieces = [self.slices[index] for index in self._read_slices]
        return [RequestSlice(piece.end - 1, 1, piece.table, adapter=piece.adapter) for piece in pieces]

    @property
    def _read_slices(self) -> Sequence[int]:
        return range(len(self.slices)) if self._read is None else self._read

    @made_once
    def adapted(self) -> Sequence[AdaptedRows]:
        """In the order of their rows; without those of an adapter that changes the tower alone."""
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
    def single_rows(self) -> DeviceRows | None:
        """Of those slices that are one token, among longer ones; None: there are none."""
        pieces, tokens = self.singles
        # An even number: a kernel is compiled once more where what it reads begins at another kind of address.
        return DeviceRows(pieces, self.device, tokens, len(pieces) + len(pieces) % 2) if pieces else None

    @made_once
    def singles(self) -> tuple[list[RequestSlice], list[int]]:
        """Slices of one token, and which tokens they are."""
        firsts = itertools.accumulate((piece.length for piece in self.slices), initial=0)
        found = [(piece, first) for piece, first in zip(self.slices, firsts, strict=False) if piece.length == 1]
        return [piece for piece, _ in found], [first for _, first in found]

    def longer_slices(self, window: int | None, rows_per_block: int) -> DeviceSlices:
        """Of those that are several tokens."""
        return DeviceSlices(self, window, rows_per_block)

    def narrowed_by(self, window: int | None) -> int | None:
        """The window; None where it is so wide that it hides nothing."""
        return None if window is None or window >= self.longest else window

    @made_once
    def _picture_ends(self) -> Tensor:
        """For each token: where the picture that it lies in ends, 0 outside pictures."""
        ends, row = torch.zeros(self.num_tokens, dtype=torch.int64), 0
        for piece in self.slices:
            before = row - piece.start
            for span in piece.pictures:
                assert not span.is_cut_by(piece.end), (span, piece.end)
                ends[max(row, before + span.start) : max(row, before + span.end)] = span.end
            row += piece.length
        return ends

    def visible(self, window: int | None, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """For each token: the interval [begin, end) of positions of its request that it sees. On the host."""
        positions = self._positions[rows]
        begin = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
        return begin, torch.maximum(positions + 1, self._picture_ends[rows])


class Attention(Protocol):
    def __call__(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor: ...  # [tokens, heads, head_dim]


def write_cache(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
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
    """The formula, written out; softmax in float32 as the reference computes it."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("hqk,khd->qhd", weights, values)
