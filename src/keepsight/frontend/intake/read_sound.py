"""Determines how long a sound is: a plain WAV from its header, other files by decoding, as few state it reliably.

Lengths are in samples at the model's sampling rate: as many as the resampled sound will have.
"""

from keepsight.errors import PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_sound import decode_pieces
from keepsight.frontend.intake.read_wav import is_wav, read_wav_header
from keepsight.frontend.intake.sound_samples import Samples, SoundSource, check_rate
from keepsight.media import Geometry
from keepsight.sound_config import SoundConfig

# Longer than any model takes; a sound that is longer still is not decoded to its end.
MAX_SECONDS = 600


def read_sound(source: SoundSource, field: str, sampling_rate: int) -> Geometry:
    """Return the length; refuse a sound that cannot be served. `field` is the caller's name for the sound."""
    rate, num_samples = _count_samples(source, field)
    geometry = Geometry(num_samples=count_resampled(num_samples, rate, sampling_rate))
    check_sound(geometry, field, sampling_rate)
    return geometry


def check_sound(geometry: Geometry, field: str, sampling_rate: int) -> None:
    """Check the length of a sound, which may come from a media worker."""
    if geometry.num_samples < 1:
        raise UnreadablePictureError(field, "a sound without samples")
    if geometry.num_samples > MAX_SECONDS * sampling_rate:
        raise PictureTooLargeError(field, f"more than {MAX_SECONDS} seconds, the most that a sound may have")


def check_sound_length(num_samples: int, config: SoundConfig, field: str) -> None:
    """Check that the model takes all of a sound; the reference silently truncates longer ones."""
    rate = config.sampling_rate
    if num_samples > config.max_samples:
        longest = f"this model takes at most {config.chunk_length} seconds"
        raise PictureTooLargeError(field, f"has {num_samples / rate:.9g} seconds, {longest}: cut it into several")
    if num_samples < config.min_samples:
        shortest = f"this model takes at least {config.min_samples}"
        raise UnsupportedPictureError(field, f"has {num_samples} samples at {rate} per second, {shortest}")


def count_resampled(num_samples: int, rate: int, wanted_rate: int) -> int:
    """Return the number of samples after resampling, rounded up as in transformers and vLLM."""
    return -(-num_samples * wanted_rate // rate)


def is_length_known(source: SoundSource) -> bool:
    """Return whether the length is known without decoding."""
    return isinstance(source, Samples) or is_wav(source)


def _count_samples(source: SoundSource, field: str) -> tuple[int, int]:
    """Return the sampling rate and the number of samples."""
    if isinstance(source, Samples):
        return source.sampling_rate, len(source.values)
    if is_wav(source):
        header = read_wav_header(source, field)
        check_rate(header.format.sampling_rate, field)
        return header.format.sampling_rate, header.num_samples
    return _count_decoded(source, field)


def _count_decoded(data: bytes, field: str) -> tuple[int, int]:
    rate, num_samples = 1, 0
    for rate, piece in decode_pieces(data, field):
        num_samples += len(piece)
        if num_samples > MAX_SECONDS * rate:
            break
    return rate, num_samples
