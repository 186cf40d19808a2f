"""Shared parts of the towers that take pictures of any size: splitting into patches, and merging patches to tokens.

The patches of a token, a square of them, are consecutive, so that merging them is a view. The work may be suspended at
every `yield`.
"""

from collections.abc import Callable, Generator, Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn

from keepsight.media import FRAMES_PER_MOMENT
from keepsight.models.layers import (
    Angles,
    LayerNorm,
    Linear,
    Placement,
    RMSNorm,
    WeightSlot,
    slots_of_convolution,
    under,
)
from keepsight.models.vision_layer import chunks, rows_at_once


def with_frames(pixels: Tensor) -> Tensor:
    """Return [pictures, frames, height, width, 3]; a picture has one frame."""
    return pixels[:, None] if pixels.dim() == 4 else pixels


class PatchEmbedding(nn.Module):
    """The reference's convolution over two frames, as one matrix product; a picture's one frame is used twice."""

    def __init__(self, place: Placement, patch_size: int, merge_size: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.size, self.merge = patch_size, merge_size
        self.linear = Linear(place, FRAMES_PER_MOMENT * self.size**2 * 3, {"proj": width}, bias=bias)

    def in_parts(
        self, pixels: Tensor, places: Callable[[slice], Tensor] | None = None
    ) -> Generator[None, None, Tensor]:
        """[pictures, frames, height, width, 3] -> [pictures, patches, hidden], some rows of tokens at a time.

        `places`: returns the position embeddings added to a slice of the patches, [patches, hidden].
        """
        pictures, _, height, width, _ = pixels.shape
        side = self.size * self.merge
        of_row = width // side * self.merge**2
        hidden = pixels.new_empty(pictures, height // side * of_row, self.linear.outputs["proj"])
        for some in chunks(height // side, max(1, rows_at_once(pixels.device) // of_row)):
            patches = slice(some.start * of_row, some.stop * of_row)
            shown = self(pixels[:, :, some.start * side : some.stop * side])
            hidden[:, patches] = shown if places is None else shown + places(patches).to(pixels.dtype)
            yield
        return hidden

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed all patches at once."""
        pictures, frames, height, width, _ = pixels.shape
        size, merge = self.size, self.merge
        side = size * merge
        grid = pixels.reshape(pictures, frames, height // side, merge, size, width // side, merge, size, 3)
        patches = grid.permute(0, 2, 5, 3, 6, 1, 4, 7, 8).reshape(pictures, -1, frames * size * size * 3)
        return self.linear(patches.repeat(1, 1, FRAMES_PER_MOMENT // frames))  # type: ignore[no-any-return]

    def slots(self) -> Iterator[WeightSlot]:
        yield from slots_of_convolution(self.linear, 3, FRAMES_PER_MOMENT, self.size, self.size)


class PatchMerger(nn.Module):
    """Merges the patches of a token into one embedding."""

    def __init__(
        self, place: Placement, norm: LayerNorm | RMSNorm, width: int, out_size: int, *, norms_merged: bool = False
    ) -> None:
        """`width`: the width of a token's patches together."""
        super().__init__()
        self.norm, self.width, self.norms_merged = norm, width, norms_merged
        self.up = Linear(place, width, {"linear_fc1": width}, bias=True)
        self.down = Linear(place, width, {"linear_fc2": out_size}, bias=True)

    def forward(self, patches: Tensor) -> Tensor:
        """[pictures, patches, vision hidden] -> [pictures, tokens, text hidden]"""
        shape = (len(patches), -1, self.width)
        merged = self.norm(patches.reshape(shape)) if self.norms_merged else self.norm(patches).view(shape)
        return self.down(self.up(merged, "gelu"))  # type: ignore[no-any-return]

    def in_parts(self, patches: Tensor) -> Generator[None, None, Tensor]:
        """Compute the same, some tokens at a time."""
        merged, of_token = [], self.width // patches.shape[2]
        for some in chunks(patches.shape[1], of_token * max(1, rows_at_once(patches.device) // of_token)):
            merged.append(self(patches[:, some].contiguous()))
            yield
        return torch.cat(merged, dim=1)

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("norm.", self.norm.slots())
        yield from self.up.slots()
        yield from self.down.slots()


@lru_cache(maxsize=16)
def places_of_patches(num_rows: int, num_columns: int, merge: int) -> Tensor:
    """Return [2, patches]: row and column of each patch, in the order of patches."""
    rows = torch.arange(num_rows)[:, None].expand(-1, num_columns)
    columns = torch.arange(num_columns).expand(num_rows, -1)
    tokens = (num_rows // merge, merge, num_columns // merge, merge)
    return torch.stack([each.reshape(tokens).transpose(1, 2).flatten() for each in (rows, columns)])


def angles_of_patches(places: Tensor, head_dim: int, theta: float) -> Angles:
    """Return cosines and sines, each [patches, 1, head_dim], on the device of `places`.

    A head's first quarter is rotated by rows, its second by columns, its third by rows, its last by columns.
    """
    spatial = head_dim // 2
    frequencies = 1.0 / theta ** (torch.arange(0, spatial, 2, dtype=torch.float32) / spatial)
    rows, columns = places[..., None, None].float() * frequencies.to(places.device)
    rotations = torch.cat((rows, columns), dim=-1)
    cos, sin = rotations.cos(), rotations.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
