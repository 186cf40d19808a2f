"""Finds the rows of media embeddings that lie in a slice of a sequence.

A slice may begin inside a picture whose first tokens were found in the prefix cache.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from keepsight.runner.encoder_output_store import EncoderOutputStore
from keepsight.runner.sequence_table import RunningSequence


class MediaRows(NamedTuple):
    """Embeddings [count, hidden] for rows [first, first + count) of a batch."""

    first: int
    embeddings: Tensor


def gather_embeddings(
    sequence: RunningSequence, start: int, end: int, first_row: int, store: EncoderOutputStore
) -> Iterator[MediaRows]:
    """Yield the media rows of positions [start, end); position `start` is row `first_row` of the batch."""
    for item, key in zip(sequence.request.media, sequence.encoder_keys, strict=True):
        first, last = max(start, item.span.start), min(end, item.span.end)
        if first < last:
            embeddings = store.get(key)
            assert len(embeddings) == item.span.length, (key, len(embeddings), item)
            yield MediaRows(first_row + first - start, embeddings[first - item.span.start : last - item.span.start])
