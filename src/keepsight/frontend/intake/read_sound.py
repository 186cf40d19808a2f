"""How long a sound is: of a plain WAV from its header, of any other file by decoding it, as few of them say it surely.

Lengths are in samples at the rate that the model takes: as many as the resampled sound will have.
"""

from collections.abc import Callable

from keepsight.errors import PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_sound import decode_pieces
from keepsight.frontend.intake.read_wav import is_wav, read_wav_header
from keepsight.frontend.intake.sound_samples import Samples, SoundSource, check_rate
from keepsight.media import Geometry
from keepsight.sound_config import SoundConfig

# A sound, what its caller calls it, and how many samples in a second the model takes.
ReadSound = Callable[[SoundSource, str, int], Geometry]
# Longer than any model takes: what is longer still is not decoded to its end.
MAX_SECONDS = 600


def read_sound(source: SoundSource, field: str, sampling_rate: int) -> Geometry:
    """Refuses what cannot be served; `field` is what the caller calls the sound."""
    rate, num_samples = _count_samples(source, field)
    geometry = Geometry(num_samples=count_resampled(num_samples, rate, sampling_rate))
    check_sound(geometry, field, sampling_rate)
    return geometry


def check_sound(geometry: Geometry, field: str, sampling_rate: int) -> None:
    """Whoever says that a sound is so long."""
    if geometry.num_samples < 1:
        raise UnreadablePictureError(field, "a sound without samples")
    if geometry.num_samples > MAX_SECONDS * sampling_rate:
        raise PictureTooLargeError(field, f"more than {MAX_SECONDS} seconds, the most that a sound may have")


def check_model_hears(num_samples: int, config: SoundConfig, field: str) -> None:
    """All of it: the reference cuts off what is longer, and says nothing."""
    rate = config.sampling_rate
    if num_samples > config.max_samples:
        longest = f"at most {config.chunk_length} seconds are taken by this model"
        raise PictureTooLargeError(field, f"has {num_samples / rate:.9g} seconds, {longest}: cut it into several")
    if num_samples < config.min_samples:
        shortest = f"at least {config.min_samples} are taken by this model"
        raise UnsupportedPictureError(field, f"has {num_samples} samples of {rate} in a second, {shortest}")


def count_resampled(num_samples: int, rate: int, wanted_rate: int) -> int:
    """As transformers and vLLM count them: a last one that is begun is one."""
    return -(-num_samples * wanted_rate // rate)


def is_length_known(source: SoundSource) -> bool:
    """At once: nothing has to be decoded."""
    return isinstance(source, Samples) or is_wav(source)


def _count_samples(source: SoundSource, field: str) -> tuple[int, int]:
    """How many there are in a second, and in all."""
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
