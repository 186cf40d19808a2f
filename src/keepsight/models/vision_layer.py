"""A layer of a vision tower: all patches of a picture see each other.

Pictures of a batch do not see each other.  Every `yield` is a place where the work may be laid aside.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models.cpu_kernels import attend_to_all, can_attend
from keepsight.models.layers import Angles, LayerNorm, Linear, Placement, WeightSlot, rotate, under

# On a CPU the inner rows of more would leave its cache between two products.
ROWS_PER_CPU_GROUP = 1024
# So many patches of all keys: as long as the other parts that a layer's work may be cut into.
ROWS_OF_ATTENTION = 2048


@dataclass(frozen=True, slots=True)
class VisionLayerConfig:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layer_norm_eps: float
    activation: str
    # What the checkpoint calls queries, keys and values: the three of them, or all that is stacked.
    qkv_names: tuple[str, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class VisionLayer(nn.Module):
    def __init__(self, config: VisionLayerConfig, place: Placement) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.rounds = place.rounds
        self.activation = config.activation
        self.norm1 = LayerNorm(place, size, config.layer_norm_eps)
        self.qkv = Linear(place, size, dict.fromkeys(config.qkv_names, 3 * size // len(config.qkv_names)), bias=True)
        self.out = Linear(place, size, {"out_proj": size}, bias=True)
        self.norm2 = LayerNorm(place, size, config.layer_norm_eps)
        self.up = Linear(place, size, {"fc1": config.intermediate_size}, bias=True)
        self.down = Linear(place, config.intermediate_size, {"fc2": size}, bias=True)

    def forward(self, hidden: Tensor, heads: Tensor, angles: Angles | None = None) -> Iterator[None]:
        """Changes `hidden` [pictures, patches, hidden] in place; `heads` is room for queries, keys and values.

        `angles`, each [patches, 1, head_dim], turn queries and keys.
        """
        groups = _row_groups(hidden)
        for group in groups:
            some = heads[group]
            some.copy_(self.qkv(self.norm1(hidden[group])).view_as(some))
            if angles is not None:
                cos, sin = (each[group[1]] for each in angles)
                for turned in some[:, :, :2].unbind(2):
                    turned.copy_(rotate(turned.float(), (cos, sin)))
            yield
        attended = torch.empty_like(hidden)
        yield from self._attend(heads, attended.view(*hidden.shape[:2], *heads.shape[3:]))
        for group in groups:
            rows = hidden[group]
            self.out.add_to(rows, attended[group])
            self.down.add_to(rows, self.up.then_activate(self.norm2(rows), self.activation))
            yield

    def make_heads(self, hidden: Tensor) -> Tensor:
        """[pictures, patches, 3, heads, head_dim], each head's by themselves, as attention reads them often."""
        pictures, patches = hidden.shape[:2]
        room = hidden.new_empty(pictures, 3, self.num_heads, patches, self.head_dim)
        return room.permute(0, 3, 1, 2, 4)

    def _attend(self, heads: Tensor, attended: Tensor) -> Iterator[None]:
        """To `attended` [pictures, patches, heads, head_dim]."""
        scale = self.head_dim**-0.5
        if not can_attend(attended[0], self.num_heads):
            query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [pictures, heads, patches, head_dim]
            attended.copy_(F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2))
            yield
            return
        pictures, patches = attended.shape[:2]
        # A head after the other: the keys and values of one stay in the cache.
        for picture, head in itertools.product(range(pictures), range(self.num_heads)):
            query, key, value = heads[picture, :, :, head].unbind(1)  # each [patches, head_dim]
            output = attended[picture, :, head]
            for rows in chunks(patches, ROWS_OF_ATTENTION):
                attend_to_all(query[rows], key, value, scale, output[rows], rounds=self.rounds)
                yield

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("layer_norm1.", self.norm1.slots())
        yield from under("self_attn.", self.qkv.slots())
        yield from under("self_attn.", self.out.slots())
        yield from under("layer_norm2.", self.norm2.slots())
        yield from under("mlp.", self.up.slots())
        yield from under("mlp.", self.down.slots())


def _row_groups(hidden: Tensor) -> list[tuple[slice, slice]]:
    """Pictures and patches."""
    pictures, patches, _ = hidden.shape
    most = rows_at_once(hidden.device)
    if patches <= most:
        return [(each, slice(None)) for each in chunks(pictures, most // patches)]
    rows = chunks(patches, most)
    return [(slice(picture, picture + 1), each) for picture in range(pictures) for each in rows]


def rows_at_once(device: torch.device) -> int:
    return ROWS_PER_CPU_GROUP if device.type == "cpu" else sys.maxsize


def chunks(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]
