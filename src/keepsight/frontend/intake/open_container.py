"""The bytes of a film or a sound behind PyAV's interface, opened but not decoded.

What strangers send reaches ffmpeg here, which reads several hundred formats, some of which name other files and
addresses.  So the demuxer is the one that its caller has chosen by the first bytes, only such as lie in one file are,
nothing else can be opened, and the decoders are those that its caller names.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from keepsight.errors import PictureTooLargeError, UnsupportedPictureError
from keepsight.frontend.intake.open_picture import refusing_damage
from keepsight.media import MAX_PIXELS

if TYPE_CHECKING:
    from av.container import InputContainer

# Which of ours brings PyAV.
_EXTRAS = {"film": "video", "sound": "audio"}
_MOV_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})


@contextmanager
def open_container(
    data: bytes, format_: str, decoders: Sequence[str], field: str, kind: str
) -> Iterator["InputContainer"]:
    """`kind` is what it is called; what ffmpeg stumbles over inside becomes ours."""
    av = _import_av(field, kind)
    options = {
        "format_whitelist": format_,
        "codec_whitelist": ",".join(decoders),
        "protocol_whitelist": "",
        # Of what ffmpeg decodes to find out what the streams are like; it does not say how many are too many for it.
        "max_pixels": str(MAX_PIXELS),
    }
    with (
        refusing_damage(field, len(data), kind),
        _refusing_bombs(av, field, kind),
        av.open(
            io.BytesIO(data), "r", format_, options, io_open=_open_nothing_else, **_reading_any_title(av)
        ) as container,
    ):
        yield container


def find_shared_format(data: bytes) -> str | None:
    """Of those that hold films and sounds alike, as ffmpeg names the demuxers."""
    if data[4:8] in _MOV_BOXES:
        return "mov"
    return "matroska" if data.startswith(b"\x1aE\xdf\xa3") else None


def _import_av(field: str, kind: str) -> ModuleType:
    try:
        import av
    except ImportError as error:
        message = (
            f"a {kind} of this format is not read here, as PyAV is missing: pip install 'keepsight[{_EXTRAS[kind]}]'"
        )
        raise UnsupportedPictureError(field, message) from error
    return av


def _reading_any_title(av: ModuleType) -> dict[str, str]:
    """A title may be in any encoding: from PyAV 19 on that hurts nobody, before it has to be asked for."""
    return {"metadata_errors": "replace"} if hasattr(av.container.InputContainer, "metadata_errors") else {}


@contextmanager
def _refusing_bombs(av: ModuleType, field: str, kind: str) -> Iterator[None]:
    """A few bytes may announce that gigabytes follow."""
    try:
        yield
    except av.error.MemoryError as error:
        raise PictureTooLargeError(field, f"the {kind} takes more memory than there is") from error


def _open_nothing_else(url: str, flags: int, options: object) -> NoReturn:
    """What a file refers to outside of itself."""
    raise PermissionError("a film or a sound may not name other files")
