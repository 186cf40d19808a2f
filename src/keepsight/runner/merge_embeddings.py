"""Writes the embeddings of media over those of their placeholder tokens.

Embeddings wider than a token's are split: each further part is added behind one of the decoder's first layers.
"""

from collections.abc import Iterable

from torch import Tensor

from keepsight.models.model import DeepRows
from keepsight.runner.gather_embeddings import MediaRows


def merge_embeddings(embeddings: Tensor, media: Iterable[MediaRows]) -> list[DeepRows]:
    """Merge media into `embeddings` [tokens, hidden] of a whole batch, in place. Return the parts that layers add."""
    deep, size = [], embeddings.shape[1]
    for first, rows in media:
        embeddings[first : first + len(rows)] = rows[:, :size]
        if rows.shape[1] > size:
            # Embeddings may be kept on the host.
            on_device = rows[:, size:].to(embeddings.device)
            deep.append(DeepRows(first, on_device.view(len(rows), -1, size)))
    return deep
