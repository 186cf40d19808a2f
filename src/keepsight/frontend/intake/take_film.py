"""Accepts films that are objects of this process: bytes of a file, an array of frames, or a list of pictures."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import numpy as np
from PIL import Image

from keepsight.errors import InvalidArgumentError, UnsupportedPictureError
from keepsight.frontend.intake.open_film import FilmSource, check_is_film
from keepsight.frontend.intake.picture_array import is_array, to_numpy
from keepsight.frontend.intake.read_film import ASSUMED_FRAMES_PER_SECOND, MAX_RATE, MIN_RATE
from keepsight.media import Excerpt, Timeline

KINDS = "a URL, a file's bytes, an array of frames, a list of pictures, or a pair of such frames and {'fps': ...}"
# Larger numbers of frames do not fit the arithmetic of floats.
MAX_TOTAL = 2**53


def are_films(value: object) -> bool:
    """Return whether this is a list of films. A list of pictures, or of arrays of one picture each, is one film."""
    return isinstance(value, list | tuple) and not any(map(_is_frame, value[:1])) and not _has_metadata(value)


def take_film(source: object, field: str) -> tuple[FilmSource, Timeline | None]:
    """Return a copy that never changes, so that its name stays valid, and for an array its timeline."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), None
    metadata: Mapping[str, object] = {}
    if _has_metadata(source):
        # Read by its keys alone: transformers' own metadata has no `get` that knows a default.
        source, given = source
        metadata = {key: given[key] for key in given}
        if isinstance(source, str | bytes | bytearray | memoryview):
            raise InvalidArgumentError(field, "must have no metadata beside it: a file says its rate itself")
    if isinstance(source, list | tuple) and source and all(map(_is_frame, source)):
        source = _stack(source, field)
    if not is_array(source):
        raise InvalidArgumentError(field, f"must be {KINDS}, not {type(source).__name__}")
    frames = _freeze_frames(source, field)
    return frames, _read_timeline(len(frames), metadata, field)


def _has_metadata(value: object) -> TypeGuard[tuple[object, Mapping[str, object]]]:
    """Return whether this is a pair of a film and its metadata, as vLLM takes it."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def _read_timeline(num_frames: int, metadata: Mapping[str, object], field: str) -> Timeline:
    """Read what the frames do not say themselves: their rate, and which frames of a longer film they are."""
    return Timeline(num_frames, _read_rate(metadata, field), _read_excerpt(num_frames, metadata, field))


def _read_rate(metadata: Mapping[str, object], field: str) -> float:
    rate = metadata.get("fps")
    if rate is None:
        return ASSUMED_FRAMES_PER_SECOND
    if isinstance(rate, np.integer | np.floating):
        rate = rate.item()
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidArgumentError(field, f"its metadata has an fps of {rate!r:.80}: it must be a number above 0")
    return float(rate)


def _read_excerpt(num_frames: int, metadata: Mapping[str, object], field: str) -> Excerpt | None:
    """Return None if these are all frames of a film, to be sampled here. Sampled ones are shown as they are."""
    every = tuple(range(num_frames))
    indices, total = metadata.get("frames_indices"), _or_default(metadata.get("total_num_frames"), num_frames)
    if not isinstance(total, Integral) or int(total) > MAX_TOTAL:
        message = f"its metadata has a total_num_frames of {total!r:.80}: it must be an integer, of at most {MAX_TOTAL}"
        raise InvalidArgumentError(field, message)
    total, numbers = int(total), every if indices is None else _read_numbers(indices, field)
    says_which = indices is not None or total == num_frames
    if not says_which or len(numbers) != num_frames or not all(0 <= each < total for each in numbers):
        message = f"which of total_num_frames ({total!r:.80}) each of its {num_frames} frames is"
        raise InvalidArgumentError(field, f"its metadata must say in frames_indices {message}")
    are_all = numbers == every and total == num_frames
    if not _or_default(metadata.get("do_sample_frames"), are_all):
        return Excerpt(numbers, total)
    if not are_all:
        raise InvalidArgumentError(field, "its metadata asks for do_sample_frames, of frames that were sampled already")
    return None


def _read_numbers(indices: object, field: str) -> tuple[int, ...]:
    values = indices if isinstance(indices, Sequence | np.ndarray) and getattr(indices, "ndim", 1) == 1 else (None,)
    if not all(isinstance(each, Integral) for each in values):
        message = f"its metadata must have a list or an array of integers as frames_indices, not {indices!r:.80}"
        raise InvalidArgumentError(field, message)
    return tuple(map(int, values))


def _or_default(value: object, default: object) -> Any:
    return default if value is None else value


def _is_frame(value: object) -> bool:
    return isinstance(value, Image.Image) or getattr(value, "ndim", 0) == 3


def _stack(frames: Sequence[Any], field: str) -> Any:
    arrays = [np.asarray(each.convert("RGB")) if isinstance(each, Image.Image) else each for each in frames]
    shapes = {tuple(each.shape) for each in arrays}
    if len(shapes) > 1:
        raise UnsupportedPictureError(field, f"frames of one film must have one shape, not {sorted(shapes)}")
    return np.stack([to_numpy(each, field) if is_array(each) else each for each in arrays])


def _freeze_frames(source: Any, field: str) -> FilmSource:
    array = to_numpy(source, field)
    if array.ndim == 4 and array.shape[1] == 3 != array.shape[3]:
        array = np.moveaxis(array, 1, -1)
    check_is_film(array, field)
    frozen = np.array(array, order="C")
    frozen.flags.writeable = False
    return frozen
