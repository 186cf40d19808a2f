"""Samples of a sound as numbers: of one channel, float32, in which full loudness is 1.

Whatever was recorded comes here in its own type of number, and leaves as soundfile, which the reference reads with,
has it: integers divided by half of their range, and of several channels the mean.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keepsight.errors import UnreadablePictureError

Mono = npt.NDArray[np.float32]  # [samples]

# In a second.
MIN_RATE, MAX_RATE = 1_000, 384_000
# Squares of larger ones may be infinite on their way to a spectrum.
MAX_MAGNITUDE = 1e10


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """A sound that is an object of this process.  Never to change."""

    values: Mono
    sampling_rate: int


# A file's bytes, or an object.
SoundSource = bytes | Samples


def mix_down(channels: npt.NDArray[Any]) -> Mono:
    """[channels, samples], of any type that files have."""
    scaled = _scale(channels)
    mono: Mono = scaled[0].copy() if len(scaled) == 1 else scaled.mean(axis=0)
    return mono


def check_rate(sampling_rate: int, field: str) -> None:
    if not MIN_RATE <= sampling_rate <= MAX_RATE:
        allowed = f"from {MIN_RATE} to {MAX_RATE} are taken"
        raise UnreadablePictureError(field, f"a sound with {sampling_rate} samples in a second; {allowed}")


def check_values(values: Mono, field: str) -> None:
    if not np.abs(values).max(initial=0) <= MAX_MAGNITUDE:  # nor is a NaN
        raise UnreadablePictureError(field, f"a sound with a NaN, an infinity, or a sample beyond {MAX_MAGNITUDE:g}")


def _scale(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    kind = values.dtype
    if kind.kind == "f":
        return values.astype(np.float32)
    scaled = values.astype(np.float32) * np.float32(2.0 ** (1 - 8 * kind.itemsize))
    return scaled - np.float32(1) if kind.kind == "u" else scaled
