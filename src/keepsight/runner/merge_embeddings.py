"""Puts the embeddings of media over those of the tokens that hold their places.

What is wider than a token's embedding is also added behind the decoder's first layers, to each its part.
"""

from collections.abc import Iterable

from torch import Tensor

from keepsight.models.model import DeepRows
from keepsight.runner.gather_embeddings import MediaRows


def merge_embeddings(embeddings: Tensor, media: Iterable[MediaRows]) -> list[DeepRows]:
    """`embeddings` [tokens, hidden] of a whole batch, changed in place."""
    deep, size = [], embeddings.shape[1]
    for first, rows in media:
        embeddings[first : first + len(rows)] = rows[:, :size]
        if rows.shape[1] > size:
            # They may be kept on the host.
            on_device = rows[:, size:].to(embeddings.device)
            deep.append(DeepRows(first, on_device.view(len(rows), -1, size)))
    return deep
