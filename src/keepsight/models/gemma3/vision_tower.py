"""Gemma 3's eye: the SigLIP encoder, and the projector that pools its patches into the decoder's embeddings.

Takes normalised pixels, channels last.  Knows nothing of prompts; pictures of a batch do not see each other.  Every
`yield` is a place where the work may be laid aside.
"""

import itertools
from collections.abc import Generator, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models.cpu_kernels import attend_to_all, can_attend
from keepsight.models.gemma3.config import VisionConfig
from keepsight.models.layers import (
    ACTIVATIONS,
    LayerNorm,
    Linear,
    Placement,
    RMSNorm,
    WeightSlot,
    empty_parameter,
    slot,
    under,
)

# On a CPU the inner rows of more would leave its cache between two products.
ROWS_PER_CPU_GROUP = 1024
# So many patches of all keys: as long as the other parts that a layer's work may be cut into.
ROWS_OF_ATTENTION = 2048


class PatchEmbedding(nn.Module):
    """The reference's convolution, whose stride is its kernel: one matrix product over flattened patches."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.size = config.patch_size
        self.side = config.patches_per_side
        outputs = {"patch_embedding": config.hidden_size}
        self.linear = Linear(place, self.size * self.size * 3, outputs, bias=True)
        self.positions = empty_parameter(place, self.side * self.side, config.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, height, width, 3] -> [pictures, patches, hidden]"""
        side, size = self.side, self.size
        # Pixels that fill no whole patch at the right and at the bottom are dropped, as by the convolution.
        grid = pixels[:, : side * size, : side * size].reshape(-1, side, size, side, size, 3)
        patches = grid.transpose(2, 3).reshape(-1, side * side, size * size * 3)
        return self.linear(patches) + self.positions  # type: ignore[no-any-return]

    def slots(self) -> Iterator[WeightSlot]:
        weight, bias = self.linear.slots()
        kernel = (weight.shape[0], 3, self.size, self.size)
        yield WeightSlot(weight.name, kernel, weight.target, _channels_last)
        yield bias
        yield slot("position_embedding.weight", self.positions)


def _channels_last(kernel: Tensor) -> Tensor:
    return kernel.permute(0, 2, 3, 1).flatten(1)


class VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.rounds = place.rounds
        self.activation = ACTIVATIONS[config.activation]
        self.norm1 = LayerNorm(place, size, config.layer_norm_eps)
        self.qkv = Linear(place, size, {"q_proj": size, "k_proj": size, "v_proj": size}, bias=True)
        self.out = Linear(place, size, {"out_proj": size}, bias=True)
        self.norm2 = LayerNorm(place, size, config.layer_norm_eps)
        self.up = Linear(place, size, {"fc1": config.intermediate_size}, bias=True)
        self.down = Linear(place, config.intermediate_size, {"fc2": size}, bias=True)

    def forward(self, hidden: Tensor, heads: Tensor) -> Iterator[None]:
        """Changes `hidden` [pictures, patches, hidden] in place; `heads` is room for queries, keys and values."""
        groups = _row_groups(hidden)
        for group in groups:
            heads[group] = self.qkv(self.norm1(hidden[group])).view_as(heads[group])
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
            for rows in _chunks(patches, ROWS_OF_ATTENTION):
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
    if hidden.device.type != "cpu":
        return [(slice(None), slice(None))]
    if patches <= ROWS_PER_CPU_GROUP:
        return [(each, slice(None)) for each in _chunks(pictures, ROWS_PER_CPU_GROUP // patches)]
    rows = _chunks(patches, ROWS_PER_CPU_GROUP)
    return [(slice(picture, picture + 1), each) for picture in range(pictures) for each in rows]


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


class VisionTower(nn.Module):
    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.embedding = PatchEmbedding(config, place)
        self.layers = nn.ModuleList(VisionLayer(config, place) for _ in range(config.num_layers))
        self.norm = LayerNorm(place, config.hidden_size, config.layer_norm_eps)

    def in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """[pictures, height, width, 3] -> [pictures, patches, hidden]"""
        hidden = self.embedding(pixels)
        layers = cast("list[VisionLayer]", list(self.layers))
        heads = layers[0].make_heads(hidden) if layers else hidden
        for layer in layers:
            yield from layer(hidden, heads)
        return self.norm(hidden)  # type: ignore[no-any-return]

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("embeddings.", self.embedding.slots())
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, VisionLayer)
            yield from under(f"encoder.layers.{index}.", layer.slots())
        yield from under("post_layernorm.", self.norm.slots())


class Projector(nn.Module):
    """Averages squares of patches, normalises, and projects into the decoder's width."""

    def __init__(self, config: VisionConfig, tokens_per_image: int, text_size: int, place: Placement) -> None:
        super().__init__()
        self.patches_per_side = config.patches_per_side
        self.tokens_per_side = round(tokens_per_image**0.5)
        self.norm = RMSNorm(place, config.hidden_size, config.layer_norm_eps)
        self.linear = Linear(place, config.hidden_size, {"mm_input_projection": text_size}, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """[pictures, patches, vision hidden] -> [pictures, tokens, text hidden]"""
        side, pool = self.tokens_per_side, self.patches_per_side // self.tokens_per_side
        squares = patches.view(-1, side, pool, side, pool, patches.shape[-1])
        pooled = squares.mean(dim=(2, 4)).flatten(1, 2)
        return self.linear(self.norm(pooled))  # type: ignore[no-any-return]

    def slots(self) -> Iterator[WeightSlot]:
        (weight,) = self.linear.slots()
        yield WeightSlot("mm_input_projection_weight", weight.shape[::-1], weight.target, torch.t)
        yield from under("mm_soft_emb_norm.", self.norm.slots())
