"""Bodies that turn a picture's tokens by their rows and columns: served where they do it as our own models do.

A body is asked where it has the tokens of a prompt of two pictures, before any weights are read.
"""

from typing import Any

import torch
from torch import Tensor

from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.models.attention import AttentionBatch
from keepsight.models.rotary_places import RotaryPlaces

# Rows and columns of tokens, each longer than the other once, between words.
GRIDS = ((2, 3), (4, 1))
NUM_WORDS = 3


def turns_by_rows(body: Any) -> bool:
    """`body`: transformers', with or without memory."""
    return hasattr(body, "get_rope_index")


def position_ids(body: Any, batch: AttentionBatch) -> Tensor:
    """[1, tokens], or [3, 1, tokens]"""
    return batch.rotary_positions.expand(3, -1)[:, None] if turns_by_rows(body) else batch.positions[None]


def mark_pictures(is_picture: Tensor) -> Tensor:
    """What such a body is told of each token: [tokens] -> [1, tokens]"""
    return is_picture[None].int()


def places_as_ours(body: Any) -> bool:
    media, end = list[MediaItem](), NUM_WORDS
    for rows, columns in GRIDS:
        media.append(MediaItem("", TokenSpan(end, rows * columns), Geometry(), columns=columns))
        end += rows * columns + NUM_WORDS
    is_picture = torch.tensor([any(position in item.span for item in media) for position in range(end)])
    told = {"input_ids": torch.zeros(1, end, dtype=torch.int64), "mm_token_type_ids": mark_pictures(is_picture)}
    try:
        # In patches, of which squares are a token.
        side = body.config.vision_config.spatial_merge_size
        grids = torch.tensor([(1, rows * side, columns * side) for rows, columns in GRIDS])
        places, _ = body.get_rope_index(image_grid_thw=grids, **told)
    except Exception:  # as it wants to be told something else
        return False
    return torch.equal(places, RotaryPlaces(media).between(0, end)[:, None])
