"""Puts the embeddings of pictures where the prompt holds their tokens."""

from collections.abc import Sequence

from torch import Tensor

from keepsight.media import MediaItem


def merge_embeddings(embeddings: Tensor, media: Sequence[MediaItem], encoded: Sequence[Tensor]) -> Tensor:
    """`embeddings` [tokens, hidden] of a whole prompt, changed in place."""
    for item, tokens in zip(media, encoded, strict=True):
        assert len(tokens) == item.span.length, (len(tokens), item)
        embeddings[item.span.start : item.span.end] = tokens
    return embeddings
