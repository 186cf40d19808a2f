"""Computes the mel spectrogram that the audio encoder takes: on a CPU equal, bit for bit, to that of the reference's
WhisperFeatureExtractor on one thread.

The reference pads every sound with silence to the maximum length. Here only the sound's own frames are computed, and
the frames behind it that still contain some of it.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.runner.openmp_team import keeping_team_size, set_team_size
from keepsight.sound_config import FRAME_LENGTH, HOP_LENGTH, SoundConfig, num_places

# In hertz, whatever the sampling rate.
MAX_FREQUENCY = 8000.0
# The mel scale (Slaney's) is linear up to here and logarithmic above.
LINEAR_HERTZ, LINEAR_MELS = 1000.0, 15.0
FAINTEST = 1e-10
# The dynamic range that is kept below the loudest value, in powers of ten.
RANGE = 8.0


class MelSpectrogram:
    """Turns sounds, carried as uint8 [sounds, samples, 1, 4], into `dtype` [sounds, frames, mels] on `device`."""

    def __init__(self, config: SoundConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self._window = torch.hann_window(FRAME_LENGTH, dtype=torch.float32).to(device)
        self._filters = torch.from_numpy(mel_filters(config)).to(device, torch.float32)

    def __call__(self, carried: Tensor) -> Tensor:
        samples = carried.to(self._window.device).view(torch.float32).flatten(1)
        # One sound at a time, on one thread: a batched or multi-threaded product may differ in the last bits.
        with keeping_team_size():
            set_team_size(1)
            return torch.stack([self._of_sound(each) for each in samples])

    def _of_sound(self, samples: Tensor) -> Tensor:
        logarithms = self._mels(self._powers(samples)).clamp(min=FAINTEST).log10()
        # The frames left out are silence, so they do not change the maximum.
        scaled = (torch.maximum(logarithms, logarithms.max() - RANGE) + 4.0) / 4.0
        num_seen = min(2 * num_places(len(samples)) + 1, self._config.max_frames)
        return scaled[:, :num_seen].T.to(self._dtype, memory_format=torch.contiguous_format)

    def _powers(self, samples: Tensor) -> Tensor:
        """Return the power spectrum [frequencies, frames].

        Frames are centered on their sample, so the first ones begin before the sound: there it is mirrored at its first
        sample, and a sound of maximum length is mirrored likewise at its end.
        """
        num_frames = min(-(-len(samples) // HOP_LENGTH) + 2, self._config.max_frames)
        half = FRAME_LENGTH // 2
        end = (num_frames - 1) * HOP_LENGTH + half
        num_samples = min(end, self._config.max_samples)
        silenced = F.pad(samples, (0, num_samples - len(samples)))
        heard = F.pad(silenced[None], (half, end - num_samples), mode="reflect")[0]
        spectrum = torch.stft(heard, FRAME_LENGTH, HOP_LENGTH, window=self._window, center=False, return_complex=True)
        return spectrum.abs() ** 2

    def _mels(self, powers: Tensor) -> Tensor:
        """Return [mels, frames].

        The last bits of a product depend on its number of columns, so it is padded to the reference's.
        """
        columns = F.pad(powers, (0, self._config.max_frames - powers.shape[1]))
        return (self._filters @ columns)[:, : powers.shape[1]].contiguous()


def mel_filters(config: SoundConfig) -> npt.NDArray[np.float64]:
    """Return the filter bank [mels, frequencies]: triangles side by side on the mel scale, all of the same area."""
    corners = _hertz(np.linspace(0.0, _mel(MAX_FREQUENCY), config.num_mels + 2))
    frequencies = np.linspace(0, config.sampling_rate // 2, FRAME_LENGTH // 2 + 1)
    widths, distances = np.diff(corners), corners[None] - frequencies[:, None]
    falling, rising = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(falling, rising))
    return (triangles * (2.0 / (corners[2:] - corners[:-2]))).T


def _mel(hertz: float) -> float:
    """Convert a frequency above `LINEAR_HERTZ` to mels."""
    return LINEAR_MELS + math.log(hertz / LINEAR_HERTZ) * (27.0 / math.log(6.4))


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = LINEAR_HERTZ * np.exp(math.log(6.4) / 27.0 * (mels - LINEAR_MELS))
    return np.where(mels < LINEAR_MELS, 200.0 * mels / 3.0, above)
