"""Bodies that rotate a picture's tokens by their rows and columns: supported if they do so as our own models do.

This is checked before any weights are read, by the positions that a body computes for a prompt of two pictures.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.models.attention import AttentionBatch
from keepsight.models.mrope_positions import MRopePositions

# Rows and columns of the test's pictures, once wide and once tall, with words around them.
GRIDS = ((2, 3), (4, 1))
NUM_WORDS = 3


def uses_mrope(body: Any) -> bool:
    """Return whether transformers' body (with or without weights) rotates by rows and columns."""
    return hasattr(body, "get_rope_index")


def position_ids(body: Any, batch: AttentionBatch) -> Tensor:
    """Return the body's position ids: [1, tokens], or [3, 1, tokens] if it rotates by rows and columns."""
    return batch.rotary_positions.expand(3, -1)[:, None] if uses_mrope(body) else batch.positions[None]


def mark_pictures(body: Any, is_picture: Tensor) -> dict[str, Tensor]:
    """Return the arguments that tell a body which tokens [tokens] are pictures', if it takes any."""
    return {name: is_picture[None].int() for name in arguments_of_kinds(body)}


def arguments_of_kinds(body: Any) -> list[str]:
    """Return the names of the arguments for each token's kind, text or picture."""
    taken = inspect.signature(body.forward).parameters
    return [name for name in ("token_type_ids", "mm_token_type_ids") if name in taken]


def places_as_ours(body: Any) -> bool:
    media, end = list[MediaItem](), NUM_WORDS
    for rows, columns in GRIDS:
        media.append(MediaItem("", TokenSpan(end, rows * columns), Geometry(), columns=columns))
        end += rows * columns + NUM_WORDS
    is_picture = torch.tensor([any(position in item.span for item in media) for position in range(end)])
    told = {"input_ids": torch.zeros(1, end, dtype=torch.int64), "mm_token_type_ids": is_picture[None].int()}
    try:
        # In patches: a token is a square of them.
        side = body.config.vision_config.spatial_merge_size
        grids = torch.tensor([(1, rows * side, columns * side) for rows, columns in GRIDS])
        places, _ = body.get_rope_index(image_grid_thw=grids, **told)
    except Exception:  # it takes other arguments
        return False
    return torch.equal(places, MRopePositions(media).between(0, end)[:, None])
