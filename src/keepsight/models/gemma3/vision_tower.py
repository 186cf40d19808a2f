"""Gemma 3's vision tower: the SigLIP encoder, and the projector that pools its patches into the decoder's embeddings.

Takes normalized pixels, channels last. Knows nothing of prompts; pictures of a batch do not see each other. The work
may be suspended at every `yield`.
"""

from collections.abc import Generator, Iterator

import torch
from torch import Tensor, nn

from keepsight.models.gemma3.config import VisionConfig
from keepsight.models.layers import (
    LayerNorm,
    Linear,
    Placement,
    RMSNorm,
    Row,
    WeightSlot,
    empty_parameter,
    slot,
    slots_of_convolution,
    under,
)
from keepsight.models.vision_layer import VisionLayer


class PatchEmbedding(nn.Module):
    """The reference's convolution, whose stride equals its kernel, as one matrix product over flattened patches."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.size = config.patch_size
        self.side = config.patches_per_side
        width = config.layer.hidden_size
        self.linear = Linear(place, self.size * self.size * 3, {"patch_embedding": width}, bias=True)
        self.positions = empty_parameter(place, self.side * self.side, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, height, width, 3] -> [pictures, patches, hidden]"""
        side, size = self.side, self.size
        # Incomplete patches at the right and at the bottom are dropped, as by the convolution.
        grid = pixels[:, : side * size, : side * size].reshape(-1, side, size, side, size, 3)
        patches = grid.transpose(2, 3).reshape(-1, side * side, size * size * 3)
        return self.linear(patches) + self.positions  # type: ignore[no-any-return]

    def slots(self) -> Iterator[WeightSlot]:
        yield from slots_of_convolution(self.linear, 3, self.size, self.size)
        yield slot("position_embedding.weight", self.positions)


class VisionTower(nn.Module):
    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.embedding = PatchEmbedding(config, place)
        self.layers = Row[VisionLayer](VisionLayer(config.layer, place) for _ in range(config.num_layers))
        self.norm = LayerNorm(place, config.layer.hidden_size, config.layer.norm_eps)

    def in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """[pictures, height, width, 3] -> [pictures, patches, hidden]"""
        hidden = self.embedding(pixels)
        layers = list(self.layers)
        heads = layers[0].make_heads(hidden)
        for layer in layers:
            yield from layer(hidden, heads)
        return self.norm(hidden)  # type: ignore[no-any-return]

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("embeddings.", self.embedding.slots())
        yield from self.layers.slots("encoder.layers")
        yield from under("post_layernorm.", self.norm.slots())


class Projector(nn.Module):
    """Averages squares of patches, normalizes, and projects to the decoder's width."""

    def __init__(self, config: VisionConfig, tokens_per_image: int, text_size: int, place: Placement) -> None:
        super().__init__()
        self.patches_per_side = config.patches_per_side
        self.tokens_per_side = round(tokens_per_image**0.5)
        width = config.layer.hidden_size
        self.norm = RMSNorm(place, width, config.layer.norm_eps, adds_one=True)
        self.linear = Linear(place, width, {"mm_input_projection": text_size}, bias=False)

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
