"""Qwen3-VL's eye: patches of a picture of any size to the decoder's embeddings, and to what is added behind its layers.

Takes normalised pixels, channels last, whose sides are multiples of a token's; of a film two frames at once.  The
patches of a token follow each other, so that merging them is reading them as one.  Every `yield` is a place where the
work may be laid aside.
"""

from collections.abc import Generator, Iterator
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn

from keepsight.models.layers import (
    Angles,
    LayerNorm,
    Linear,
    Placement,
    WeightSlot,
    empty_parameter,
    slot,
    under,
)
from keepsight.models.qwen3_vl.config import FRAMES_PER_PATCH, LAYER_NORM_EPS, VisionConfig
from keepsight.models.vision_layer import VisionLayer, chunks, rows_at_once


class PatchEmbedding(nn.Module):
    """The reference's convolution over two frames, as one matrix product; a picture is both of its frames."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.size, self.merge = config.patch_size, config.merge_size
        self.linear = Linear(place, FRAMES_PER_PATCH * self.size**2 * 3, {"proj": config.layer.hidden_size}, bias=True)

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, frames, height, width, 3] -> [pictures, patches, hidden]"""
        pictures, frames, height, width, _ = pixels.shape
        size, merge = self.size, self.merge
        side = size * merge
        grid = pixels.reshape(pictures, frames, height // side, merge, size, width // side, merge, size, 3)
        patches = grid.permute(0, 2, 5, 3, 6, 1, 4, 7, 8).reshape(pictures, -1, frames * size * size * 3)
        return self.linear(patches.repeat(1, 1, FRAMES_PER_PATCH // frames))  # type: ignore[no-any-return]

    def slots(self) -> Iterator[WeightSlot]:
        weight, bias = self.linear.slots()
        kernel = (weight.shape[0], 3, FRAMES_PER_PATCH, self.size, self.size)
        yield WeightSlot(weight.name, kernel, weight.target, _channels_last)
        yield bias


def _channels_last(kernel: Tensor) -> Tensor:
    return kernel.permute(0, 2, 3, 4, 1).flatten(1)


class PatchMerger(nn.Module):
    """A token's patches become one embedding."""

    def __init__(self, config: VisionConfig, place: Placement, *, norms_merged: bool) -> None:
        super().__init__()
        size = config.layer.hidden_size
        self.merge_size, self.width = config.merge_size, size * config.merge_size**2
        self.norms_merged = norms_merged
        self.norm = LayerNorm(place, self.width if norms_merged else size, LAYER_NORM_EPS)
        self.up = Linear(place, self.width, {"linear_fc1": self.width}, bias=True)
        self.down = Linear(place, self.width, {"linear_fc2": config.out_size}, bias=True)

    def forward(self, patches: Tensor) -> Tensor:
        """[pictures, patches, vision hidden] -> [pictures, tokens, text hidden]"""
        shape = (len(patches), -1, self.width)
        merged = self.norm(patches.reshape(shape)) if self.norms_merged else self.norm(patches).view(shape)
        return self.down(self.up.then_activate(merged, "gelu"))  # type: ignore[no-any-return]

    def in_parts(self, patches: Tensor) -> Generator[None, None, Tensor]:
        """The same, some tokens at a time."""
        merged, of_token = [], self.merge_size**2
        for some in chunks(patches.shape[1], of_token * max(1, rows_at_once(patches.device) // of_token)):
            merged.append(self(patches[:, some]))
            yield
        return torch.cat(merged, dim=1)

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("norm.", self.norm.slots())
        yield from self.up.slots()
        yield from self.down.slots()


class VisionTower(nn.Module):
    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.config = config
        self.embedding = PatchEmbedding(config, place)
        self.positions = empty_parameter(place, config.positions_per_side**2, config.layer.hidden_size)
        self.layers = nn.ModuleList(VisionLayer(config.layer, place) for _ in range(config.num_layers))
        self.merger = PatchMerger(config, place, norms_merged=False)
        self.deep_mergers = nn.ModuleList(PatchMerger(config, place, norms_merged=True) for _ in config.deep_layers)

    def in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """[pictures, height, width, 3], or [moments, 2, height, width, 3] -> [pictures, tokens, media width]"""
        size = self.config.patch_size
        if pixels.dim() == 4:
            pixels = pixels[:, None]
        grid = (pixels.shape[2] // size, pixels.shape[3] // size)
        rows, columns = _places_of_patches(*grid, self.config.merge_size)
        hidden = yield from self._embed(pixels, rows, columns, grid)
        angles = self._angles(rows, columns)
        layers = cast("list[VisionLayer]", list(self.layers))
        mergers = dict(zip(self.config.deep_layers, cast("list[PatchMerger]", list(self.deep_mergers)), strict=True))
        heads, deep = layers[0].make_heads(hidden), []
        for index, layer in enumerate(layers):
            yield from layer(hidden, heads, angles)
            if index in mergers:
                deep.append((yield from mergers[index].in_parts(hidden)))
        merged = yield from self.merger.in_parts(hidden)
        return torch.cat((merged, *deep), dim=-1)

    def _embed(
        self, pixels: Tensor, rows: Tensor, columns: Tensor, grid: tuple[int, int]
    ) -> Generator[None, None, Tensor]:
        """[pictures, patches, hidden], some rows of tokens at a time."""
        hidden = pixels.new_empty(len(pixels), len(rows), self.config.layer.hidden_size)
        row_of_tokens, side = grid[1] * self.config.merge_size, self.config.patch_size * self.config.merge_size
        for some in chunks(len(rows) // row_of_tokens, max(1, rows_at_once(pixels.device) // row_of_tokens)):
            patches = slice(some.start * row_of_tokens, some.stop * row_of_tokens)
            places = self._embed_places(rows[patches], columns[patches], grid)
            shown = self.embedding(pixels[:, :, some.start * side : some.stop * side])
            hidden[:, patches] = shown + places.to(pixels.dtype)
            yield
        return hidden

    def _embed_places(self, rows: Tensor, columns: Tensor, grid: tuple[int, int]) -> Tensor:
        """[patches, hidden]: between the learnt embeddings, which are spread over the picture from edge to edge."""
        side = self.config.positions_per_side
        table = self.positions.float()
        embedded = table.new_zeros(len(rows), table.shape[1])
        for row, row_share in _neighbours(rows, grid[0], side):
            for column, column_share in _neighbours(columns, grid[1], side):
                share = (row_share * column_share).to(table.device)
                embedded += table[(row * side + column).to(table.device)] * share[:, None]
        return embedded

    def _angles(self, rows: Tensor, columns: Tensor) -> Angles:
        """Each [patches, 1, head_dim]: a head's first quarter turns by rows, its second by columns, and so on."""
        spatial = self.config.layer.head_dim // 2
        frequencies = 1.0 / self.config.rotary_theta ** (torch.arange(0, spatial, 2, dtype=torch.float32) / spatial)
        turned = torch.cat([places[:, None].float() * frequencies for places in (rows, columns)], dim=-1)
        turned = turned.to(self.positions.device)[:, None]
        cos, sin = turned.cos(), turned.sin()
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("patch_embed.", self.embedding.slots())
        yield slot("pos_embed.weight", self.positions)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, VisionLayer)
            yield from under(f"blocks.{index}.", layer.slots())
        yield from under("merger.", self.merger.slots())
        for index, merger in enumerate(self.deep_mergers):
            assert isinstance(merger, PatchMerger)
            yield from under(f"deepstack_merger_list.{index}.", merger.slots())


@lru_cache(maxsize=16)
def _places_of_patches(num_rows: int, num_columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, in their order."""
    rows = torch.arange(num_rows)[:, None].expand(-1, num_columns)
    columns = torch.arange(num_columns).expand(num_rows, -1)
    tokens = (num_rows // merge, merge, num_columns // merge, merge)
    row, column = (each.reshape(tokens).transpose(1, 2).flatten() for each in (rows, columns))
    return row, column


def _neighbours(places: Tensor, num_places: int, side: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The two of `side` places that each of `num_places` in a row lies between, and their shares."""
    spread = places.float() * (side - 1) / max(1, num_places - 1)
    before = spread.floor()
    share = spread - before
    yield before.long(), 1 - share
    yield (before.long() + 1).clamp(max=side - 1), share
