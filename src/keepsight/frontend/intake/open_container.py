"""Opens the bytes of a film or a sound with PyAV, without decoding them.

Untrusted files reach ffmpeg here, which reads several hundred formats, some of which refer to other files and
addresses. So the caller chooses the demuxer by the first bytes, among formats that consist of one file; nothing else
can be opened; and only the decoders that the caller names are allowed.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from keepsight.errors import PictureTooLargeError, UnsupportedPictureError
from keepsight.frontend.intake.open_picture import translating_parser_errors
from keepsight.media import MAX_PIXELS

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

# The extra of our package that installs PyAV, by kind.
_EXTRAS = {"film": "video", "sound": "audio"}
_MOV_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})


@contextmanager
def open_container(
    data: bytes, format_: str, decoders: Sequence[str], field: str, kind: str
) -> Iterator["InputContainer"]:
    """Open a file of this `kind` (film or sound). ffmpeg's errors in the `with` block are raised as errors of ours."""
    av = _import_av(field, kind)
    options = {
        "format_whitelist": format_,
        "codec_whitelist": ",".join(decoders),
        "protocol_whitelist": "",
        # For frames that ffmpeg decodes while it probes the streams; it does not say how many are too many for it.
        "max_pixels": str(MAX_PIXELS),
    }
    with (
        translating_parser_errors(field, len(data), kind),
        _refusing_bombs(av, field, kind),
        av.open(
            io.BytesIO(data), "r", format_, options, io_open=_open_nothing_else, **_metadata_options(av)
        ) as container,
    ):
        yield container


def find_shared_format(data: bytes) -> str | None:
    """Return ffmpeg's demuxer for a container that may hold films or sounds, or None if this is no such container."""
    if data[4:8] in _MOV_BOXES:
        return "mov"
    return "matroska" if data.startswith(b"\x1aE\xdf\xa3") else None


def prepare_decoder(stream: "AudioStream | VideoStream", decoders: Sequence[str], field: str, kind: str) -> None:
    """Refuse a stream in any other codec, and keep its decoder to one thread.

    A media worker has one core, and threads would hold many frames in memory at once.
    """
    codec = stream.codec_context.name if stream.codec_context else "unknown"
    if codec not in decoders:
        raise UnsupportedPictureError(field, f"a {kind} in {codec}; these are read: {', '.join(decoders)}")
    stream.codec_context.thread_count = 1


def _import_av(field: str, kind: str) -> ModuleType:
    try:
        import av
    except ImportError as error:
        message = (
            f"a {kind} of this format cannot be read here, as PyAV is missing: pip install 'keepsight[{_EXTRAS[kind]}]'"
        )
        raise UnsupportedPictureError(field, message) from error
    return av


def _metadata_options(av: ModuleType) -> dict[str, str]:
    """Return options that accept titles in any encoding, which PyAV does by default only from version 19 on."""
    return {"metadata_errors": "replace"} if hasattr(av.container.InputContainer, "metadata_errors") else {}


@contextmanager
def _refusing_bombs(av: ModuleType, field: str, kind: str) -> Iterator[None]:
    """Refuse files for which ffmpeg runs out of memory: a few bytes may announce that gigabytes follow."""
    try:
        yield
    except av.error.MemoryError as error:
        raise PictureTooLargeError(field, f"the {kind} needs more memory than is available") from error


def _open_nothing_else(url: str, flags: int, options: object) -> NoReturn:
    """Refuse to open anything that a file refers to."""
    raise PermissionError("a film or a sound must not refer to other files")
