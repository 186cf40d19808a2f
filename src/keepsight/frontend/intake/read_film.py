"""Reads the size, the number and the rate of a film's frames from the packets of its file.

Decodes only the first frame, since the rotation is found nowhere else. Frames are counted as they are in the file and
will be decoded: some headers have no number of frames, and the others include frames that an editor cut off.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from keepsight.errors import PictureTooLargeError, UnreadablePictureError
from keepsight.frontend.intake.open_film import (
    FilmArray,
    FilmSource,
    check_frame_size,
    check_is_film,
    open_film,
    turns_of,
)
from keepsight.media import DEFAULT_MAX_PIXELS, Geometry, Timeline

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# An hour at 60 frames a second. All frames up to the last one shown are decoded: minutes on one core.
MAX_FRAMES = 60 * 60 * 60
# Frames a second: no film is faster, and a slower one has no second frame within a day.
MAX_RATE, MIN_RATE = 1_000_000, 1e-5
# What the reference assumes for a film without a frame rate.
ASSUMED_FRAMES_PER_SECOND = 24.0


def read_film(
    source: FilmSource,
    field: str,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    timeline: Timeline | None = None,
) -> Geometry:
    """Return the geometry; refuse a film that cannot be served.

    `field` is the caller's name for the film, `timeline` that of an array of frames, if somebody states it.
    """
    if isinstance(source, np.ndarray):
        geometry = _describe_array(source, field, timeline)
    else:
        with open_film(source, field, max_pixels) as (container, stream):
            geometry = _look_through(container, stream, field)
    check_film(geometry, field, max_pixels)
    return geometry


def check_film(geometry: Geometry, field: str, max_pixels: int) -> None:
    """Check the geometry of a film, which may come from a media worker."""
    check_frame_size(geometry.width, geometry.height, field, max_pixels)
    assert geometry.timeline is not None, geometry
    num_frames, rate = geometry.timeline.num_frames, geometry.timeline.frames_per_second
    if num_frames < 1:
        raise UnreadablePictureError(field, "a film without frames")
    if num_frames > MAX_FRAMES:
        raise PictureTooLargeError(field, f"more than {MAX_FRAMES} frames, the most that a film may have")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise UnreadablePictureError(field, f"a film that claims {rate} frames per second")


def _describe_array(array: FilmArray, field: str, timeline: Timeline | None) -> Geometry:
    check_is_film(array, field)
    num_frames, height, width, _ = array.shape
    return Geometry(width, height, timeline or Timeline(num_frames, ASSUMED_FRAMES_PER_SECOND))


def _look_through(container: "InputContainer", stream: "VideoStream", field: str) -> Geometry:
    first: VideoFrame | None = None
    # One for each packet that has a frame; unknown in some files.
    times: list[int | None] = []
    for packet in container.demux(stream):
        if first is None:
            first = next(iter(packet.decode()), None)
        if packet.is_corrupt:
            raise UnreadablePictureError(field, "a film that ends in the middle of a frame")
        # An edit list marks what an editor cut out as discarded.
        if packet.size > 0 and not packet.is_discard:
            times.append(packet.pts)
        if len(times) > MAX_FRAMES:
            break
    if first is None:
        raise UnreadablePictureError(field, "a film without frames")
    if first.pts is not None:
        # A film that was cut between key frames begins with packets that cannot be decoded, and give no frame.
        times = [time for time in times if time is None or time >= first.pts]
    width, height = (first.width, first.height) if turns_of(first) % 2 == 0 else (first.height, first.width)
    return Geometry(width, height, Timeline(len(times), _rate_of(stream, times)))


def _rate_of(stream: "VideoStream", times: Sequence[int | None]) -> float:
    """Return the frames per second: on average where frames come irregularly, as in recordings of browsers."""
    if stream.average_rate:
        return float(stream.average_rate)
    known = [time for time in times if time is not None]
    ticks = max(known, default=0) - min(known, default=0)
    if not ticks or not stream.time_base:
        return ASSUMED_FRAMES_PER_SECOND
    return (len(known) - 1) / float(ticks * stream.time_base)
