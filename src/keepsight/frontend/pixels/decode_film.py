"""Decodes the wanted frames of a film: upright and in RGB, as the reference's PyAV reader returns them.

They are yielded once each in display order, until the last wanted one. Other frames are decoded, as wanted frames
depend on them, but not converted; no frame is kept here.
"""

from collections.abc import Iterator, Set

import numpy as np

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.intake.open_film import FilmSource, open_film, turns_of
from keepsight.media import DEFAULT_MAX_PIXELS
from keepsight.requests import Pixels


def decode_film(
    source: FilmSource, wanted: Set[int], field: str = "video", max_pixels: int = DEFAULT_MAX_PIXELS
) -> Iterator[tuple[int, Pixels]]:
    """Yield each frame's number and uint8 [height, width, 3]. Refuses a film that has fewer frames than it said."""
    if isinstance(source, np.ndarray):
        yield from ((number, source[number]) for number in sorted(wanted))
        return
    number, last, turns = -1, max(wanted), 0
    with open_film(source, field, max_pixels) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number == 0:
                turns = turns_of(frame)
            if number in wanted:
                # On one thread, like the decoding.
                yield number, np.rot90(frame.to_ndarray(format="rgb24", threads=1), turns)
            if number == last:
                return
    raise UnreadablePictureError(
        field, f"it has no frame {last}: only {number + 1} can be decoded of those it contains"
    )
