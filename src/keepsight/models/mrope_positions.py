"""Rotary positions for a decoder that rotates a picture's tokens by their rows and columns (M-RoPE).

All tokens of a picture have the time at which it begins, and a row and a column counted from there. The text after it
continues after the longer of its sides, so its rotary positions are smaller than its positions in the prompt.

Consecutive moments of a film count rows and columns from the beginning of the film, and each has a time of its own; the
text continues after the largest of all these.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keepsight.media import MediaItem


class MRopePositions:
    def __init__(self, media: Iterable[MediaItem]) -> None:
        """`media`: in order of position."""
        # `begin`: rotary position where the current picture or film begins; `place`: where the next token would be.
        parts, position, begin, place = [], 0, 0, 0
        for item in media:
            text = item.span.start - position
            parts.append(_text_positions(place, text))
            place += text
            begin = place if item.rotary_offset is None else begin
            parts.append(_item_positions(item) + begin)
            place = max(place, begin + _extent(item))
            position = item.span.end
        # [3, positions] up to the end of the last item.
        self._places = torch.cat(parts, dim=1)
        # Position minus rotary position of all tokens after it.
        self.shift = position - place

    def between(self, start: int, end: int) -> Tensor:
        """Return [3, end - start]: time, row and column of each position."""
        first_behind = max(start, self._places.shape[1])
        behind = _text_positions(first_behind - self.shift, max(0, end - first_behind))
        return torch.cat((self._places[:, start:end], behind), dim=1)


def _text_positions(first: int, length: int) -> Tensor:
    return torch.arange(first, first + length).expand(3, -1)


def _item_positions(item: MediaItem) -> Tensor:
    """Return [3, tokens], counted from where the item begins. Items without rows count like text."""
    if not item.columns:
        return _text_positions(0, item.span.length)
    rows = torch.arange(item.span.length) // item.columns
    columns = torch.arange(item.span.length) % item.columns
    return torch.stack((torch.full_like(rows, item.rotary_offset or 0), rows, columns))


def _extent(item: MediaItem) -> int:
    if not item.columns:
        return item.span.length
    return max(item.columns, item.span.length // item.columns, 1 + (item.rotary_offset or 0))
