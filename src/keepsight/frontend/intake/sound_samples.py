"""Converts the samples of a sound to one channel of float32, with a full scale of 1.

Samples of all number types are converted as by soundfile, with which the reference reads: integers are divided by half
of their range, and several channels are averaged.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keepsight.errors import UnreadablePictureError

Mono = npt.NDArray[np.float32]  # [samples]

# Samples per second.
MIN_RATE, MAX_RATE = 1_000, 384_000
# Squares of larger samples may become infinite when a spectrum is computed.
MAX_MAGNITUDE = 1e10


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """A sound that is an object of this process. Must never change."""

    values: Mono
    sampling_rate: int


# A file's bytes, or an object.
SoundSource = bytes | Samples


def mix_down(channels: npt.NDArray[Any]) -> Mono:
    """Mix [channels, samples], of any number type that files have, down to [samples]."""
    scaled = _scale(channels)
    mono: Mono = scaled[0].copy() if len(scaled) == 1 else scaled.mean(axis=0)
    return mono


def check_rate(sampling_rate: int, field: str) -> None:
    if not MIN_RATE <= sampling_rate <= MAX_RATE:
        allowed = f"{MIN_RATE} to {MAX_RATE} are allowed"
        raise UnreadablePictureError(field, f"a sound with {sampling_rate} samples per second; {allowed}")


def check_values(values: Mono, field: str) -> None:
    if not np.abs(values).max(initial=0) <= MAX_MAGNITUDE:  # false for a NaN, too
        raise UnreadablePictureError(field, f"a sound with a NaN, an infinity, or a sample beyond {MAX_MAGNITUDE:g}")


def _scale(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    kind = values.dtype
    if kind.kind == "f":
        return values.astype(np.float32)
    scaled = values.astype(np.float32) * np.float32(2.0 ** (1 - 8 * kind.itemsize))
    return scaled - np.float32(1) if kind.kind == "u" else scaled
