"""A layer of a tower: the patches of a picture attend to each other, all of them or within windows.

Pictures of a batch do not see each other. Sounds are treated as pictures, and their positions as patches. The work
may be suspended at every `yield`.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models.cpu_kernels import attend_to_all, can_attend
from keepsight.models.feed_forward import FeedForward, GatedFeedForward
from keepsight.models.gpu_library import kernels_for
from keepsight.models.layers import Angles, LayerNorm, Linear, Placement, RMSNorm, WeightSlot, rotate, under

# With more rows, intermediate results would be evicted from the CPU's cache between two products.
ROWS_PER_CPU_GROUP = 1024
# Query rows per part of attention over all keys: takes about as long as the other parts of a layer's work.
ROWS_OF_ATTENTION = 2048


@dataclass(frozen=True, slots=True)
class VisionLayerConfig:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_eps: float
    activation: str
    # The checkpoint's names of the query, key and value projections: three names, or one if they are stacked.
    qkv_names: tuple[str, ...]
    norms: Literal["layer", "rms"] = "layer"
    has_gate: bool = False
    # Names in `qkv_names` that have no bias.
    unbiased: tuple[str, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Windows(NamedTuple):
    """Patches [first, end), divided into consecutive windows of `size` patches that see each other."""

    first: int
    end: int
    size: int

    def works(self) -> Iterator[list[tuple[slice, slice]]]:
        """Yield the parts of the work: pairs of some patches and the patches that they see."""
        windows = chunks(self.end, self.size, self.first)
        if self.size <= ROWS_OF_ATTENTION:
            yield [(window, window) for window in windows]
            return
        for window in windows:
            yield from ([(rows, window)] for rows in chunks(window.stop, ROWS_OF_ATTENTION, window.start))


class VisionLayer(nn.Module):
    def __init__(self, config: VisionLayerConfig, place: Placement) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.rounds = place.rounds
        self.norm1, self.norm2 = _make_norm(config, place), _make_norm(config, place)
        outputs = dict.fromkeys(config.qkv_names, 3 * size // len(config.qkv_names))
        self.qkv = Linear(place, size, outputs, bias=True, unbiased=config.unbiased)
        self.out = Linear(place, size, {"out_proj": size}, bias=True)
        wide, activation = config.intermediate_size, config.activation
        self.feed_forward: FeedForward | GatedFeedForward
        if config.has_gate:
            self.feed_forward = GatedFeedForward(place, size, wide, activation, bias=True)
        else:
            self.feed_forward = FeedForward(place, size, wide, activation)

    def forward(
        self, hidden: Tensor, heads: Tensor, angles: Angles | None = None, windows: Sequence[Windows] = ()
    ) -> Iterator[None]:
        """Update `hidden` [pictures, patches, hidden] in place; `heads` is a buffer for queries, keys and values.

        `angles`, each [patches, 1, head_dim], rotate queries and keys. Without `windows` all patches see each other.
        """
        groups = row_groups(hidden)
        for group in groups:
            turns = angles and (angles[0][group[1]], angles[1][group[1]])
            place_heads(self.qkv(self.norm1(hidden[group])), turns, heads[group])
            yield
        attended = torch.empty_like(hidden)
        yield from self.attend(heads, attended.view(*hidden.shape[:2], *heads.shape[3:]), windows)
        for group in groups:
            rows = hidden[group]
            self.out(attended[group], onto=rows)
            self.feed_forward.add_to(rows, self.norm2(rows))
            yield

    def make_heads(self, hidden: Tensor) -> Tensor:
        """Allocate [pictures, patches, 3, heads, head_dim]; each head is contiguous, as attention reads it often."""
        pictures, patches = hidden.shape[:2]
        room = hidden.new_empty(pictures, 3, self.num_heads, patches, self.head_dim)
        return room.permute(0, 3, 1, 2, 4)

    def attend(self, heads: Tensor, attended: Tensor, windows: Sequence[Windows]) -> Iterator[None]:
        """Compute attention from queries, keys and values into `attended` [pictures, patches, heads, head_dim]."""
        scale = self.head_dim**-0.5
        pictures, patches = attended.shape[:2]
        windows = windows or [Windows(0, patches, patches)]
        if kernels := kernels_for(attended.device):
            for each in windows:
                kernels.attend_to_all(heads, attended, *each, scale)
                yield
            return
        if not can_attend(attended[0], self.num_heads):
            for each in windows:
                _attend_plainly(heads, attended, each, scale)
                yield
            return
        # One head at a time, so that its keys and values stay in the CPU's cache.
        for picture, head in itertools.product(range(pictures), range(self.num_heads)):
            query, key, value = heads[picture, :, :, head].unbind(1)  # each [patches, head_dim]
            output = attended[picture, :, head]
            for work in itertools.chain.from_iterable(each.works() for each in windows):
                for rows, seen in work:
                    attend_to_all(query[rows], key[seen], value[seen], scale, output[rows], rounds=self.rounds)
                yield

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("layer_norm1.", self.norm1.slots())
        yield from under("self_attn.", self.qkv.slots())
        yield from under("self_attn.", self.out.slots())
        yield from under("layer_norm2.", self.norm2.slots())
        yield from under("mlp.", self.feed_forward.slots())


def _make_norm(config: VisionLayerConfig, place: Placement) -> LayerNorm | RMSNorm:
    if config.norms == "layer":
        return LayerNorm(place, config.hidden_size, config.norm_eps)
    return RMSNorm(place, config.hidden_size, config.norm_eps, adds_one=False)


def place_heads(projected: Tensor, angles: Angles | None, heads: Tensor) -> None:
    """Copy queries, keys and values of some patches to `heads`, with queries and keys rotated by `angles`."""
    projected = projected.view_as(heads)
    if kernels := kernels_for(heads.device):
        kernels.place_patches(projected, angles, heads)
        return
    heads.copy_(projected)
    if angles is not None:
        for part in heads[:, :, :2].unbind(2):
            part.copy_(rotate(part.float(), angles))


def _attend_plainly(heads: Tensor, attended: Tensor, windows: Windows, scale: float) -> None:
    some = slice(windows.first, windows.end)
    # Each [pictures * windows, heads, patches, head_dim].
    query, key, value = (
        each.reshape(-1, windows.size, *each.shape[2:]).transpose(1, 2) for each in heads[:, some].unbind(2)
    )
    output = F.scaled_dot_product_attention(query, key, value, scale=scale)
    attended[:, some] = output.transpose(1, 2).reshape(attended[:, some].shape)


def row_groups(hidden: Tensor) -> list[tuple[slice, slice]]:
    """Return groups of rows that are computed at once, as slices of pictures and of patches."""
    pictures, patches, _ = hidden.shape
    most = rows_at_once(hidden.device)
    if patches <= most:
        return [(each, slice(None)) for each in chunks(pictures, most // patches)]
    rows = chunks(patches, most)
    return [(slice(picture, picture + 1), each) for picture in range(pictures) for each in rows]


def rows_at_once(device: torch.device) -> int:
    return ROWS_PER_CPU_GROUP if device.type == "cpu" else sys.maxsize


def chunks(end: int, size: int, start: int = 0) -> list[slice]:
    return [slice(first, min(first + size, end)) for first in range(start, end, size)]
