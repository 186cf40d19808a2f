"""Decodes the wanted frames of a film: upright and in RGB, as the reference's PyAV reader returns them.

They are yielded once each in display order, until the last wanted one. Other frames are decoded, as wanted frames
depend on them, but not converted; no frame is kept here.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.intake.open_film import FilmSource, open_film, turns_of
from keepsight.media import DEFAULT_MAX_PIXELS
from keepsight.requests import Pixels

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

# The part of the frames counted in a file that may be missing at its end, as some packets give no frame.
MOST_MISSING = 1 / 8
Frame = TypeVar("Frame")


def decode_film(
    source: FilmSource,
    wanted: Set[int],
    field: str = "video",
    max_pixels: int = DEFAULT_MAX_PIXELS,
    is_given_up: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Pixels]]:
    """Yield each frame's number and uint8 [height, width, 3]. Fails at the next frame once the film is given up.

    If only a few frames are missing at the end, the last one is repeated; a film that lacks more is refused.
    """
    if isinstance(source, np.ndarray):
        yield from ((number, source[number]) for number in _unless(is_given_up, sorted(wanted)))
        return
    number, last, turns = -1, max(wanted), 0
    with open_film(source, field, max_pixels) as (container, stream):
        for number, frame in enumerate(_unless(is_given_up, container.decode(stream))):
            if number == 0:
                turns = turns_of(frame)
            if number in wanted:
                yield number, _to_upright(frame, turns)
            if number == last:
                return
        if number < 0 or last - number > max(1, MOST_MISSING * (last + 1)):
            message = f"it has no frame {last}: only {number + 1} can be decoded of those it contains"
            raise UnreadablePictureError(field, message)
        pixels = _to_upright(frame, turns)
        yield from ((missing, pixels) for missing in sorted(wanted) if missing > number)


def _unless(is_given_up: Callable[[], bool], frames: Iterable[Frame]) -> Iterator[Frame]:
    for frame in frames:
        if is_given_up():
            raise RuntimeError("nobody waits for the film any more")
        yield frame


def _to_upright(frame: "VideoFrame", turns: int) -> Pixels:
    # On one thread, like the decoding.
    return np.rot90(frame.to_ndarray(format="rgb24", threads=1), turns)
