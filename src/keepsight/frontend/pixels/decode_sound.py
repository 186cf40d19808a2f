"""Decodes a sound into samples of one channel at the model's sampling rate, as the reference does."""

import numpy as np

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.intake.open_sound import decode_pieces
from keepsight.frontend.intake.read_wav import decode_wav, is_wav
from keepsight.frontend.intake.sound_samples import Mono, Samples, SoundSource, check_values
from keepsight.frontend.pixels.resample_sound import resample


def decode_sound(source: SoundSource, wanted_rate: int, num_samples: int, field: str = "audio") -> Mono:
    """Return the samples. Refuses a sound that has more or fewer of them than it said."""
    decoded = _decode(source, field, num_samples / wanted_rate)
    check_values(decoded.values, field)
    samples = resample(decoded.values, decoded.sampling_rate, wanted_rate)
    if len(samples) != num_samples:
        message = f"its header says that there are {num_samples} samples, its content has {len(samples)}"
        raise UnreadablePictureError(field, message)
    return samples


def _decode(source: SoundSource, field: str, max_seconds: float) -> Samples:
    """Return the samples at the sound's own rate; a sound longer than `max_seconds` is not decoded to its end."""
    if isinstance(source, Samples):
        return source
    if is_wav(source):
        return decode_wav(source, field)
    pieces, num_samples, rate = [np.empty(0, np.float32)], 0, 1
    for rate, piece in decode_pieces(source, field):
        pieces.append(piece)
        num_samples += len(piece)
        if num_samples > max_seconds * rate + 1:
            break
    return Samples(np.concatenate(pieces), rate)
