"""Accepts films that are objects of this process: bytes of a file, an array of frames, or a list of pictures."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from PIL import Image

from keepsight.errors import InvalidArgumentError, UnsupportedPictureError
from keepsight.frontend.intake.open_film import FilmSource, check_is_film
from keepsight.frontend.intake.picture_array import is_tensor, to_numpy
from keepsight.frontend.intake.read_film import ARRAY_FRAMES_PER_SECOND, MAX_RATE, MIN_RATE

KINDS = "a URL, a file's bytes, an array of frames, a list of pictures, or a pair of either and {'fps': ...}"


def are_films(value: object) -> bool:
    """Return whether this is a list of films.  A list of pictures, or of arrays of one picture each, is one film."""
    return isinstance(value, list | tuple) and not any(map(_is_frame, value[:1])) and not _has_metadata(value)


def take_film(source: object, field: str) -> tuple[FilmSource, float]:
    """Return a copy that never changes, so that its name stays valid, and the frame rate of an array."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), ARRAY_FRAMES_PER_SECOND
    rate = ARRAY_FRAMES_PER_SECOND
    if _has_metadata(source):
        source, metadata = source
        rate = _read_rate(metadata, field)
    if isinstance(source, list | tuple) and source and all(map(_is_frame, source)):
        source = _stack(source, field)
    if not isinstance(source, np.ndarray) and not is_tensor(source):
        raise InvalidArgumentError(field, f"must be {KINDS}, not {type(source).__name__}")
    return _freeze_frames(source, field), rate


def _has_metadata(value: object) -> TypeGuard[tuple[object, Mapping[str, object]]]:
    """Return whether this is a pair of a film and its metadata, as vLLM takes it."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def _read_rate(metadata: Mapping[str, object], field: str) -> float:
    """Return the frame rate; everything else in the metadata is known from the frames."""
    rate = metadata.get("fps", ARRAY_FRAMES_PER_SECOND)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidArgumentError(field, f"its metadata has an fps of {rate!r:.80}: it must be a number above 0")
    return float(rate)


def _is_frame(value: object) -> bool:
    return isinstance(value, Image.Image) or getattr(value, "ndim", 0) == 3


def _stack(frames: Sequence[Any], field: str) -> Any:
    arrays = [np.asarray(each.convert("RGB")) if isinstance(each, Image.Image) else each for each in frames]
    shapes = {tuple(each.shape) for each in arrays}
    if len(shapes) > 1:
        raise UnsupportedPictureError(field, f"frames of one film must have one shape, not {sorted(shapes)}")
    return np.stack([to_numpy(each, field) if is_tensor(each) else each for each in arrays])


def _freeze_frames(source: Any, field: str) -> FilmSource:
    array = source if isinstance(source, np.ndarray) else to_numpy(source, field)
    if array.ndim == 4 and array.shape[1] == 3 != array.shape[3]:
        array = np.moveaxis(array, 1, -1)
    check_is_film(array, field)
    frozen = np.array(array, order="C")
    frozen.flags.writeable = False
    return frozen
