"""Qwen3-VL's vision tower: encodes pictures of any size into embeddings and the vectors added after decoder layers.

Takes normalized pixels, channels last, with sides that are multiples of a token's; of a film two frames at once. The
work may be suspended at every `yield`.
"""

from collections.abc import Generator, Iterator

import torch
from torch import Tensor, nn

from keepsight.models.layers import LayerNorm, Placement, Row, WeightSlot, empty_parameter, slot, under
from keepsight.models.patches import PatchEmbedding, PatchMerger, angles_of_patches, places_of_patches, with_frames
from keepsight.models.qwen3_vl.config import VisionConfig
from keepsight.models.vision_layer import VisionLayer


class VisionTower(nn.Module):
    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.config = config
        width = config.layer.hidden_size
        self.embedding = PatchEmbedding(place, config.patch_size, config.merge_size, width, bias=True)
        self.positions = empty_parameter(place, config.positions_per_side**2, width)
        self.layers = Row[VisionLayer](VisionLayer(config.layer, place) for _ in range(config.num_layers))
        self.merger = _make_merger(config, place, norms_merged=False)
        self.deep_mergers = Row[PatchMerger](_make_merger(config, place, norms_merged=True) for _ in config.deep_layers)

    def in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """[pictures, height, width, 3], or [moments, 2, height, width, 3] -> [pictures, tokens, media width]"""
        size = self.config.patch_size
        pixels = with_frames(pixels)
        grid = (pixels.shape[2] // size, pixels.shape[3] // size)
        # Position embeddings and angles are computed on the device: a host of many cores takes milliseconds for these.
        places = places_of_patches(*grid, self.config.merge_size).to(pixels.device)
        hidden = yield from self.embedding.in_parts(pixels, lambda some: self._embed_places(places[:, some], grid))
        angles = angles_of_patches(places, self.config.layer.head_dim, self.config.rotary_theta)
        layers = list(self.layers)
        mergers = dict(zip(self.config.deep_layers, self.deep_mergers, strict=True))
        heads, deep = layers[0].make_heads(hidden), []
        for index, layer in enumerate(layers):
            yield from layer(hidden, heads, angles)
            if index in mergers:
                deep.append((yield from mergers[index].in_parts(hidden)))
        merged = yield from self.merger.in_parts(hidden)
        return torch.cat((merged, *deep), dim=-1)

    def _embed_places(self, places: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return [patches, hidden], interpolated from the learned embeddings, which span the picture edge to edge."""
        side = self.config.positions_per_side
        (rows, columns), table = places, self.positions.float()
        embedded = table.new_zeros(len(rows), table.shape[1])
        for row, row_share in _neighbours(rows, grid[0], side):
            for column, column_share in _neighbours(columns, grid[1], side):
                embedded += table[row * side + column] * (row_share * column_share)[:, None]
        return embedded

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("patch_embed.", self.embedding.slots())
        yield slot("pos_embed.weight", self.positions)
        yield from self.layers.slots("blocks")
        yield from under("merger.", self.merger.slots())
        yield from self.deep_mergers.slots("deepstack_merger_list")


def _make_merger(config: VisionConfig, place: Placement, *, norms_merged: bool) -> PatchMerger:
    size, of_token = config.layer.hidden_size, config.layer.hidden_size * config.merge_size**2
    norm = LayerNorm(place, of_token if norms_merged else size, config.layer.norm_eps)
    return PatchMerger(place, norm, of_token, config.out_size, norms_merged=norms_merged)


def _neighbours(places: Tensor, num_places: int, side: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the two of `side` grid points between which each of `num_places` places lies, and their weights."""
    spread = places.float() * (side - 1) / max(1, num_places - 1)
    before = spread.floor()
    share = spread - before
    yield before.long(), 1 - share
    yield (before.long() + 1).clamp(max=side - 1), share
