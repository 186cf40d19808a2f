"""Qwen2.5-VL's vision tower: encodes pictures of any size into the decoder's embeddings.

Takes normalized pixels, channels last, with sides that are multiples of a token's; of a film two frames at once. In
most layers a patch sees the patches of its window, a square of tokens; windows at the right and at the bottom may be
smaller. Tokens are therefore reordered so that those of a window are consecutive, and windows of one size, too; the
result is put back in order. The work may be suspended at every `yield`.
"""

from collections.abc import Generator, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from keepsight.models.layers import Placement, RMSNorm, Row, WeightSlot, under
from keepsight.models.patches import PatchEmbedding, PatchMerger, angles_of_patches, places_of_patches, with_frames
from keepsight.models.qwen2_5_vl.config import VisionConfig
from keepsight.models.vision_layer import VisionLayer, Windows


class VisionTower(nn.Module):
    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        self.config = config
        width = config.layer.hidden_size
        self.embedding = PatchEmbedding(place, config.patch_size, config.merge_size, width, bias=False)
        self.layers = Row[VisionLayer](VisionLayer(config.layer, place) for _ in range(config.num_layers))
        norm = RMSNorm(place, width, config.layer.norm_eps, adds_one=False)
        self.merger = PatchMerger(place, norm, width * config.merge_size**2, config.out_size)

    def in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """[pictures, height, width, 3], or [moments, 2, height, width, 3] -> [pictures, tokens, hidden]"""
        config = self.config
        pixels = with_frames(pixels)
        grid = (pixels.shape[2] // config.patch_size, pixels.shape[3] // config.patch_size)
        arranged = _arrange(*grid, config.merge_size, config.window_side)
        order, back = arranged.patches.to(pixels.device), arranged.back.to(pixels.device)
        hidden = (yield from self.embedding.in_parts(pixels))[:, order]
        places = places_of_patches(*grid, config.merge_size).to(pixels.device)[:, order]
        angles = angles_of_patches(places, config.layer.head_dim, config.rotary_theta)
        layers = list(self.layers)
        heads = layers[0].make_heads(hidden)
        for index, layer in enumerate(layers):
            yield from layer(hidden, heads, angles, () if index in config.whole_layers else arranged.windows)
        merged = yield from self.merger.in_parts(hidden)
        return merged[:, back]

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("patch_embed.", self.embedding.slots())
        yield from self.layers.slots("blocks")
        yield from under("merger.", self.merger.slots())


class _Arranged(NamedTuple):
    patches: Tensor  # original index of each, in the new order
    back: Tensor  # new index of each token, in the original order
    windows: tuple[Windows, ...]  # one for each size


@lru_cache(maxsize=16)
def _arrange(num_rows: int, num_columns: int, merge: int, side: int) -> _Arranged:
    """Order patches in rows and columns by window: whole windows, those at either edge, then that in the corner."""
    num_rows, num_columns, of_token = num_rows // merge, num_columns // merge, merge**2
    tokens = torch.arange(num_rows * num_columns).view(num_rows, num_columns)
    rows, columns = num_rows - num_rows % side, num_columns - num_columns % side
    order, windows, first = list[Tensor](), list[Windows](), 0
    for area in (tokens[:rows, :columns], tokens[:rows, columns:], tokens[rows:, :columns], tokens[rows:, columns:]):
        if area.numel():
            height, width = (min(side, each) for each in area.shape)
            squares = area.reshape(area.shape[0] // height, height, area.shape[1] // width, width)
            order.append(squares.transpose(1, 2).flatten())
            end = first + area.numel() * of_token
            windows.append(Windows(first, end, height * width * of_token))
            first = end
    arranged = torch.cat(order)
    patches = (arranged[:, None] * of_token + torch.arange(of_token)).flatten()
    return _Arranged(patches, arranged.argsort(), tuple(windows))
