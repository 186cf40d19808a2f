"""Samples to the spectrogram that an encoder hears: on a CPU equal to that of the reference's
WhisperFeatureExtractor on one thread, to the last bit.

The reference extends every sound by silence to the longest that there may be.  Here only the frames of the sound itself
are made, and as many behind it as hold some of it.
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
# The scale of mels (Slaney's) is even up to here, and a logarithm's above.
LINEAR_HERTZ, LINEAR_MELS = 1000.0, 15.0
FAINTEST = 1e-10
# Of the loudest and the faintest, in powers of ten.
RANGE = 8.0


class MelSpectrogram:
    """uint8 [sounds, samples, 1, 4], as they are carried, to `dtype` [sounds, frames, mels] on `device`."""

    def __init__(self, config: SoundConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self._window = torch.hann_window(FRAME_LENGTH, dtype=torch.float32).to(device)
        self._filters = torch.from_numpy(mel_filters(config)).to(device, torch.float32)

    def __call__(self, carried: Tensor) -> Tensor:
        samples = carried.to(self._window.device).view(torch.float32).flatten(1)
        # One by one, by one thread: a product of several, or one that several threads share, may have other last bits.
        with keeping_team_size():
            set_team_size(1)
            return torch.stack([self._of_sound(each) for each in samples])

    def _of_sound(self, samples: Tensor) -> Tensor:
        logarithms = self._mels(self._powers(samples)).clamp(min=FAINTEST).log10()
        # What is left out is silence, which is no louder.
        scaled = (torch.maximum(logarithms, logarithms.max() - RANGE) + 4.0) / 4.0
        num_seen = min(2 * num_places(len(samples)) + 1, self._config.max_frames)
        return scaled[:, :num_seen].T.to(self._dtype, memory_format=torch.contiguous_format)

    def _powers(self, samples: Tensor) -> Tensor:
        """[frequencies, frames].  A frame's middle is its own sample, so the first begin before the sound: they hear
        what is behind its first sample, in reverse, and the last ones of the longest sound likewise.
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
        """[mels, frames].  The last bits of a product hang on how many columns it has: there are the reference's."""
        columns = F.pad(powers, (0, self._config.max_frames - powers.shape[1]))
        return (self._filters @ columns)[:, : powers.shape[1]].contiguous()


def mel_filters(config: SoundConfig) -> npt.NDArray[np.float64]:
    """[mels, frequencies]: triangles that stand side by side on the scale of mels, all of one area."""
    corners = _hertz(np.linspace(0.0, _mel(MAX_FREQUENCY), config.num_mels + 2))
    frequencies = np.linspace(0, config.sampling_rate // 2, FRAME_LENGTH // 2 + 1)
    widths, distances = np.diff(corners), corners[None] - frequencies[:, None]
    falling, rising = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(falling, rising))
    return (triangles * (2.0 / (corners[2:] - corners[:-2]))).T


def _mel(hertz: float) -> float:
    """Above `LINEAR_HERTZ`."""
    return LINEAR_MELS + math.log(hertz / LINEAR_HERTZ) * (27.0 / math.log(6.4))


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = LINEAR_HERTZ * np.exp(math.log(6.4) / 27.0 * (mels - LINEAR_MELS))
    return np.where(mels < LINEAR_MELS, 200.0 * mels / 3.0, above)
