"""Accepts sounds that are objects of this process: bytes of a file, samples, or a pair of samples and sampling rate."""

import numbers
from typing import Any, TypeGuard

import numpy as np

from keepsight.errors import InvalidArgumentError, UnsupportedPictureError
from keepsight.frontend.intake.picture_array import is_array, to_numpy
from keepsight.frontend.intake.sound_samples import Mono, Samples, SoundSource, check_rate, check_values

KINDS = "a URL, a file's bytes, samples as an array or a list of floats, or a pair (samples, sampling rate)"


def are_sounds(value: object) -> bool:
    """Return whether this is a list of sounds. A list of floats is the samples of a single one, as in vLLM."""
    return isinstance(value, list | tuple) and not _are_floats(value) and not _has_rate(value)


def take_sound(source: object, field: str, sampling_rate: int) -> SoundSource:
    """Return a copy that never changes, so that its name stays valid; `sampling_rate` is for samples without a rate."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if _has_rate(source):
        source, rate = source
        sampling_rate = _read_rate(rate, field)
    if _are_floats(source):
        source = np.array(source, np.float32)
    if not is_array(source):
        raise InvalidArgumentError(field, f"must be {KINDS}, not {type(source).__name__}")
    return Samples(_freeze(source, field), sampling_rate)


def _has_rate(value: object) -> TypeGuard[tuple[object, float]]:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], numbers.Real)


def _are_floats(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(each, float) for each in value)


def _read_rate(rate: float, field: str) -> int:
    if not float(rate).is_integer():
        raise InvalidArgumentError(field, f"its sampling rate must be a whole number, not {rate!r:.80}")
    check_rate(int(rate), field)
    return int(rate)


def _freeze(source: Any, field: str) -> Mono:
    array = to_numpy(source, field)
    if array.dtype.kind != "f" or array.ndim not in (1, 2):
        taken = "floats [samples], [channels, samples] or [samples, channels]; whole numbers are divided by 32768 first"
        raise UnsupportedPictureError(
            field, f"an array of {array.dtype} {list(array.shape)} is not a sound; allowed are {taken}"
        )
    channels = array.astype(np.float32)
    if channels.ndim == 2:
        channels = (channels.T if channels.shape[0] > channels.shape[1] else channels).mean(axis=0)
    check_values(channels, field)
    channels.flags.writeable = False
    return channels
