"""Gemma 3's eye: the SigLIP encoder, and the projector that pools its patches into the decoder's embeddings.

Takes normalised pixels, channels last.  Knows nothing of prompts; pictures of a batch do not see each other.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

ROWS_PER_CPU_GROUP = 1024
FLOATS_PER_VECTOR = 16


class PatchEmbedding(nn.Module):
    """The reference's convolution, whose stride is its kernel: one matrix product over flattened patches."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.size = config.patch_size
        self.side = config.patches_per_side
        self.weight = empty_parameter(place, config.hidden_size, self.size * self.size * 3)
        self.bias = empty_parameter(place, config.hidden_size)
        self.positions = empty_parameter(place, self.side * self.side, config.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, height, width, 3] -> [pictures, patches, hidden]"""
        side, size = self.side, self.size
        # Pixels that fill no whole patch at the right and at the bottom are dropped, as by the convolution.
        grid = pixels[:, : side * size, : side * size].reshape(-1, side, size, side, size, 3)
        patches = grid.transpose(2, 3).reshape(-1, side * side, size * size * 3)
        return F.linear(patches, self.weight, self.bias) + self.positions

    def slots(self) -> Iterator[WeightSlot]:
        hidden, size = self.weight.shape[0], self.size
        yield WeightSlot("patch_embedding.weight", (hidden, 3, size, size), self.weight, _channels_last)
        yield slot("patch_embedding.bias", self.bias)
        yield slot("position_embedding.weight", self.positions)


def _channels_last(kernel: Tensor) -> Tensor:
    return kernel.permute(0, 2, 3, 1).flatten(1)


class VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.activation = ACTIVATIONS[config.activation]
        self.norm1 = LayerNorm(place, size, config.layer_norm_eps)
        self.qkv = Linear(place, size, {"q_proj": size, "k_proj": size, "v_proj": size}, bias=True)
        self.out = Linear(place, size, {"out_proj": size}, bias=True)
        self.norm2 = LayerNorm(place, size, config.layer_norm_eps)
        self.up = Linear(place, size, {"fc1": config.intermediate_size}, bias=True)
        self.down = Linear(place, config.intermediate_size, {"fc2": size}, bias=True)

    def forward(self, hidden: Tensor) -> None:
        """Changes `hidden` [pictures, patches, hidden] in place."""
        attended = self._attend(self.qkv(self.norm1(hidden)))
        groups = (_groups_that_stay_in_cache(tensor.flatten(0, 1)) for tensor in (hidden, attended))
        for rows, attended_rows in zip(*groups, strict=True):
            rows.add_(self.out(attended_rows))
            rows.add_(self.down(self.up.then_activate(self.norm2(rows), self.activation)))

    def _attend(self, qkv: Tensor) -> Tensor:
        pictures, patches, _ = qkv.shape
        split = qkv.view(pictures, patches, 3, self.num_heads, self.head_dim)
        heads = split.permute(2, 0, 3, 1, 4)  # [3, pictures, heads, patches, head_dim]
        if heads.device.type == "cpu":
            heads = _laid_out_for_cpu(heads)
        query, key, value = heads.unbind(0)
        output = F.scaled_dot_product_attention(query, key, value, scale=self.head_dim**-0.5)
        return output[..., : self.head_dim].transpose(1, 2).flatten(2)

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("layer_norm1.", self.norm1.slots())
        yield from under("self_attn.", self.qkv.slots())
        yield from under("self_attn.", self.out.slots())
        yield from under("layer_norm2.", self.norm2.slots())
        yield from under("mlp.", self.up.slots())
        yield from under("mlp.", self.down.slots())


def _laid_out_for_cpu(heads: Tensor) -> Tensor:
    """Each head's rows together in memory, and zeros up to whole vectors: torch's kernel takes 15 % less so."""
    width = -(-heads.shape[-1] // FLOATS_PER_VECTOR) * FLOATS_PER_VECTOR
    padded = heads.new_empty(*heads.shape[:-1], width)
    padded[..., : heads.shape[-1]] = heads
    padded[..., heads.shape[-1] :] = 0
    return padded


def _groups_that_stay_in_cache(rows: Tensor) -> Sequence[Tensor]:
    """On a CPU the wide inner rows of a whole picture would travel to memory and back between two products."""
    return torch.split(rows, ROWS_PER_CPU_GROUP) if rows.device.type == "cpu" else (rows,)


class VisionTower(nn.Module):
    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.embedding = PatchEmbedding(config, place)
        self.layers = nn.ModuleList(VisionLayer(config, place) for _ in range(config.num_layers))
        self.norm = LayerNorm(place, config.hidden_size, config.layer_norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, height, width, 3] -> [pictures, patches, hidden]"""
        hidden = self.embedding(pixels)
        for layer in self.layers:
            layer(hidden)
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
        self.weight = empty_parameter(place, config.hidden_size, text_size)

    def forward(self, patches: Tensor) -> Tensor:
        """[pictures, patches, vision hidden] -> [pictures, tokens, text hidden]"""
        side, pool = self.tokens_per_side, self.patches_per_side // self.tokens_per_side
        squares = patches.view(-1, side, pool, side, pool, patches.shape[-1])
        pooled = squares.mean(dim=(2, 4)).flatten(1, 2)
        return self.norm(pooled) @ self.weight  # type: ignore[no-any-return]

    def slots(self) -> Iterator[WeightSlot]:
        yield slot("mm_input_projection_weight", self.weight)
        yield from under("mm_soft_emb_norm.", self.norm.slots())
