"""Decodes the bytes of a sound that is no plain WAV with PyAV: selects its stream, and yields its pieces one by one.

Formats are recognized by their first bytes, and the decoders are those of common music and speech files. From a film,
the sound is taken.
"""

import codecs
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from keepsight.errors import UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_container import find_shared_format, open_container, prepare_decoder
from keepsight.frontend.intake.open_film import BRANDS_OF_SOUNDS
from keepsight.frontend.intake.open_picture import brand_of
from keepsight.frontend.intake.read_wav import is_wav
from keepsight.frontend.intake.sound_samples import Mono, check_rate, mix_down

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

# By ffmpeg's demuxer names; WAV is read without ffmpeg.
FORMATS = {
    "wav": "WAV",
    "flac": "FLAC",
    "mp3": "MP3",
    "ogg": "OGG, Opus",
    "aac": "AAC",
    "mov": "M4A, MP4",
    "matroska": "WebM, MKV",
}
DECODERS = ("aac", "alac", "flac", "mp3", "mp3float", "opus", "vorbis")
_STARTS = {b"fLaC": "flac", b"OggS": "ogg"}
# Of a tag with a title, which may come before the sound in several formats.
_TAG, _TAG_HEADER_BYTES = b"ID3", 10
_HAS_FOOTER = 0x10  # a flag; the footer is as long as the header
_LAYER_BITS = 0x06
# The number of plane pointers in the ffmpeg frame struct itself.
MAX_CHANNELS = 8


def decode_pieces(data: bytes, field: str) -> Iterator[tuple[int, Mono]]:
    """Yield, for each piece, the sampling rate, which is the same for all, and the samples."""
    first_rate: int | None = None
    with open_container(data, _format_of(data, field), DECODERS, field, "sound") as container:
        for frame in container.decode(_sound_stream(container, field)):
            first_rate = first_rate or frame.sample_rate
            if frame.sample_rate != first_rate:
                message = f"a sound that changes to {frame.sample_rate} samples per second from {first_rate}"
                raise UnsupportedPictureError(field, message)
            check_rate(first_rate, field)
            yield first_rate, _mix_down_frame(frame, field)


def looks_like_a_sound(data: bytes) -> bool:
    """Return whether this is a sound and nothing else: containers count as films, except those that say what they are.

    A text in UTF-16 begins like a frame of a kind that is hardly ever seen.
    """
    is_sound = is_wav(data) or brand_of(data) in BRANDS_OF_SOUNDS or _find_own_format(data) is not None
    return is_sound and not data.startswith(codecs.BOM_UTF16_LE)


def _format_of(data: bytes, field: str) -> str:
    found = _find_own_format(data) or find_shared_format(data)
    if found is None:
        raise UnreadablePictureError(field, f"{len(data)} bytes that are none of {', '.join(FORMATS.values())}")
    return found


def _find_own_format(data: bytes) -> str | None:
    place = _end_of_tag(data)
    first, second = data[place : place + 1], data[place + 1 : place + 2]
    if first == b"\xff" and second >= b"\xe0":  # a plain sequence of frames: each begins with eleven bits set
        return "mp3" if second[0] & _LAYER_BITS else "aac"
    found = next((name for start, name in _STARTS.items() if data.startswith(start, place)), None)
    return "mp3" if found is None and place else found


def _end_of_tag(data: bytes) -> int:
    """Return the number of bytes of the tags before the sound."""
    end = 0
    while data.startswith(_TAG, end):
        header, size = data[end : end + _TAG_HEADER_BYTES], 0
        for byte in header[6:]:
            size = size << 7 | byte & 0x7F
        has_footer = len(header) > 5 and header[5] & _HAS_FOOTER
        end += size + _TAG_HEADER_BYTES * (2 if has_footer else 1)
    return end


def _sound_stream(container: "InputContainer", field: str) -> "AudioStream":
    stream = next(iter(container.streams.audio), None)
    if stream is None:
        raise UnreadablePictureError(field, "a file without sound")
    prepare_decoder(stream, DECODERS, field, "sound")
    return stream


def _mix_down_frame(frame: "AudioFrame", field: str) -> Mono:
    """Mix a frame down without PyAV's `planes`, and so `to_ndarray`, which read past the eighth plane pointer."""
    from av.audio.frame import format_dtypes
    from av.audio.plane import AudioPlane

    num_channels, kind = frame.layout.nb_channels, np.dtype(format_dtypes[frame.format.name])
    if not 0 < num_channels <= MAX_CHANNELS:
        raise UnsupportedPictureError(field, f"a sound of {num_channels} channels; at most {MAX_CHANNELS} are allowed")
    if not frame.format.is_planar:
        packed = np.frombuffer(bytes(AudioPlane(frame, 0)), kind, frame.samples * num_channels)
        return mix_down(packed.reshape(frame.samples, num_channels).T)
    planes = [bytes(AudioPlane(frame, each)) for each in range(num_channels)]
    return mix_down(np.stack([np.frombuffer(each, kind, frame.samples) for each in planes]))
