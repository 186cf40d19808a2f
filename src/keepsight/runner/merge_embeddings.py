"""Puts the embeddings of media over those of the tokens that hold their places."""

from collections.abc import Iterable

from torch import Tensor

from keepsight.runner.gather_embeddings import MediaRows


def merge_embeddings(embeddings: Tensor, media: Iterable[MediaRows]) -> Tensor:
    """`embeddings` [tokens, hidden] of a whole batch, changed in place."""
    for first, rows in media:
        embeddings[first : first + len(rows)] = rows
    return embeddings
