"""Resamples a sound with a windowed sinc, as torchaudio's `resample` does, which vLLM uses.

Each new sample is a weighted sum of the old ones around it. The weights repeat: there are as many sets of them as the
new rate has samples until both rates meet again.
"""

import math

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from keepsight.frontend.intake.read_sound import count_resampled
from keepsight.frontend.intake.sound_samples import Mono

# torchaudio's defaults: the zero crossings of the sinc on either side, and how much of the band is kept.
NUM_ZEROS = 6
ROLLOFF = 0.99


def resample(samples: Mono, rate: int, wanted_rate: int) -> Mono:
    if rate == wanted_rate:
        return samples
    shared = math.gcd(rate, wanted_rate)
    old, new = rate // shared, wanted_rate // shared
    weights = _weigh(old, new)
    width = weights.shape[1] // 2
    around = sliding_window_view(np.pad(samples, width), weights.shape[1])
    resampled = np.empty(count_resampled(len(samples), rate, wanted_rate), np.float32)
    for phase in range(min(new, len(resampled))):
        wanted = resampled[phase::new]
        np.einsum("st,t->s", around[phase * old // new :: old][: len(wanted)], weights[phase], out=wanted)
    return resampled


def _weigh(old: int, new: int) -> npt.NDArray[np.float32]:
    """Return the weights of the old samples around each new one: [new, samples around]."""
    cutoff = min(old, new) * ROLLOFF / old
    width = math.ceil(NUM_ZEROS / cutoff)
    behind = np.arange(new) * old % new / new
    zeros = (np.arange(-width, width + 1) - behind[:, None]) * cutoff
    window = np.cos(zeros.clip(-NUM_ZEROS, NUM_ZEROS) * (math.pi / 2 / NUM_ZEROS)) ** 2
    weights: npt.NDArray[np.float64] = np.sinc(zeros) * window * cutoff
    return weights.astype(np.float32)
