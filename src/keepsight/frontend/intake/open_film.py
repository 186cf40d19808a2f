"""Opens the bytes of a film with PyAV, without decoding them, and selects its video stream.

Formats are recognized by their first bytes, and the decoders are those of common films.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from keepsight.errors import PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_container import find_shared_format, open_container, prepare_decoder
from keepsight.frontend.intake.open_document import may_be_a_document
from keepsight.frontend.intake.open_picture import HEIC_BRANDS, brand_of, find_format
from keepsight.media import MAX_PIXELS

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

FilmArray = npt.NDArray[np.uint8]  # [frames, height, width, 3]
FilmSource = bytes | FilmArray

# By ffmpeg's demuxer names.
FORMATS = {"mov": "MP4, MOV", "matroska": "WebM, MKV", "avi": "AVI", "gif": "GIF"}
# Files of MP4 boxes that are pictures (the last is a camera's raw one), and those that are sounds.
_BRANDS_OF_PICTURES = frozenset({b"avif", b"avis", b"mif1", b"msf1", b"miaf", b"crx "}) | HEIC_BRANDS
BRANDS_OF_SOUNDS = frozenset({b"M4A ", b"M4B "})
DECODERS = (
    "gif",
    "h263",
    "h264",
    "hevc",
    "libdav1d",
    "mjpeg",
    "mpeg1video",
    "mpeg2video",
    "mpeg4",
    "prores",
    "vp8",
    "vp9",
)


@contextmanager
def open_film(data: bytes, field: str, max_pixels: int) -> Iterator[tuple["InputContainer", "VideoStream"]]:
    """Yield the container and its first video stream that is no cover, of at most `max_pixels` per frame."""
    with open_container(data, _format_of(data, field), DECODERS, field, "film") as container:
        yield container, _video_stream(container, field, max_pixels)


def looks_like_a_film(data: bytes) -> bool:
    """Return whether this is a film and nothing else. GIFs may be pictures; files of MP4 boxes pictures or sounds."""
    return _find_format(data) not in (None, "gif") and brand_of(data) not in _BRANDS_OF_PICTURES | BRANDS_OF_SOUNDS


def _format_of(data: bytes, field: str) -> str:
    found = _find_format(data)
    if found is None:
        formats = ", ".join(FORMATS.values())
        raise UnreadablePictureError(field, f"{len(data)} bytes that are none of {formats}{_hint_for(data)}")
    return found


def _hint_for(data: bytes) -> str:
    # Imported here, as its module imports this one.
    from keepsight.frontend.intake.open_sound import looks_like_a_sound

    if find_format(data) is not None:
        return ": a picture, to be sent as one (image_url)"
    if looks_like_a_sound(data):
        return ": a sound, to be sent as one (audio_url)"
    return ": a PDF, to be sent as one (file)" if may_be_a_document(data) else ""


def _find_format(data: bytes) -> str | None:
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "avi"
    return "gif" if data.startswith((b"GIF87a", b"GIF89a")) else find_shared_format(data)


def _video_stream(container: "InputContainer", field: str, max_pixels: int) -> "VideoStream":
    from av.stream import Disposition

    stream = next((each for each in container.streams.video if not each.disposition & Disposition.attached_pic), None)
    if stream is None:
        raise UnreadablePictureError(field, "a film without a video stream")
    prepare_decoder(stream, DECODERS, field, "film")
    check_frame_size(stream.width, stream.height, field, max_pixels)
    stream.codec_context.options = {"max_pixels": str(_decoder_pixel_limit(stream, max_pixels))}
    return stream


def _decoder_pixel_limit(stream: "VideoStream", max_pixels: int) -> int:
    """Return the limit a decoder needs for frames of `max_pixels`, should frames grow in the course of the film.

    A decoder counts rows padded to multiples of 64 pixels; those of MPEG-4 count 280 such rows beside the frame.
    """
    longer, beside = 64 * stream.height, 280 * (stream.width + 256)
    return min(max_pixels + longer + beside, MAX_PIXELS)


def check_is_film(array: npt.NDArray[Any], field: str) -> None:
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
        message = (
            f"an array of {array.dtype} {list(array.shape)} is not a film; allowed are uint8 [frames, height, width, 3]"
        )
        raise UnsupportedPictureError(field, message)


def check_frame_size(width: int, height: int, field: str, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise UnreadablePictureError(field, f"a film whose frames have no pixels, or more than {MAX_PIXELS}")
    if width * height > max_pixels:
        message = f"frames of {width} x {height} pixels have {width * height}, at most {max_pixels} are allowed"
        raise PictureTooLargeError(field, message)


def turns_of(frame: "VideoFrame") -> int:
    """Return by how many right angles a frame is rotated counterclockwise for display, as phones record in films.

    Other angles and mirroring are ignored, as in OpenCV.
    """
    return frame.rotation // 90 % 4 if frame.rotation % 90 == 0 else 0
