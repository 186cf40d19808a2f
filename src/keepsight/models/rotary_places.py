"""Where the tokens of a prompt stand for a decoder that turns a picture's tokens by their rows and columns.

All tokens of a picture have the time at which it begins, and a row and a column that are counted from there.  The text
behind it goes on behind the longer of its sides, so it stands nearer to the beginning than its position says.

Moments of a film that lie one behind the other have their rows and columns from where the film begins, and each a time
of its own; the text goes on behind the largest of all these.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keepsight.media import MediaItem


class RotaryPlaces:
    def __init__(self, media: Iterable[MediaItem]) -> None:
        """`media`, in their order."""
        # `begin`: where the picture or the film at hand does; `place`: where whatever comes next would.
        parts, position, begin, place = [], 0, 0, 0
        for item in media:
            text = item.span.start - position
            parts.append(_line(place, text))
            place += text
            begin = place if item.places_later is None else begin
            parts.append(_grid(item) + begin)
            place = max(place, begin + _extent(item))
            position = item.span.end
        # Up to the end of the last item: [3, positions].
        self._places = torch.cat(parts, dim=1)
        # Of all behind it.
        self.shift = position - place

    def between(self, start: int, end: int) -> Tensor:
        """[3, end - start]: each one's time, row and column."""
        first_behind = max(start, self._places.shape[1])
        behind = _line(first_behind - self.shift, max(0, end - first_behind))
        return torch.cat((self._places[:, start:end], behind), dim=1)


def _line(first: int, length: int) -> Tensor:
    return torch.arange(first, first + length).expand(3, -1)


def _grid(item: MediaItem) -> Tensor:
    """[3, tokens], counted from where it begins.  What has no rows is a line, as text is."""
    if not item.columns:
        return _line(0, item.span.length)
    rows = torch.arange(item.span.length) // item.columns
    columns = torch.arange(item.span.length) % item.columns
    return torch.stack((torch.full_like(rows, item.places_later or 0), rows, columns))


def _extent(item: MediaItem) -> int:
    if not item.columns:
        return item.span.length
    return max(item.columns, item.span.length // item.columns, 1 + (item.places_later or 0))
