"""Reads plain WAV files without a library: the header, and the samples after it.

PCM of 8 to 32 bits and floats, of any number of channels. A header is a sequence of chunks, limited in number. The
bytes that follow it count, not the length it states: a recorder that was cut off or wrote to a pipe could not know it.
"""

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from keepsight.errors import UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.sound_samples import Samples, mix_down

MAX_CHUNKS = 1000
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# numpy's dtypes, by kind and bits; it has none of 24 bits, which are read as bytes.
_KINDS = {
    (_PCM, 8): "<u1",
    (_PCM, 16): "<i2",
    (_PCM, 24): "<u1",
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}
_DESCRIPTION = struct.Struct("<HHIIHH")
_MAX_DESCRIPTION_BYTES = 40


class _Format(NamedTuple):
    kind: int
    bits: int
    num_channels: int
    sampling_rate: int

    @property
    def bytes_at_once(self) -> int:
        """The size of one sample of each channel."""
        return self.num_channels * self.bits // 8


class WavHeader(NamedTuple):
    format: _Format
    # Where the samples begin, and how many each channel has.
    begin: int
    num_samples: int


def is_wav(data: bytes) -> bool:
    return data.startswith(b"RIFF") and data[8:12] == b"WAVE"


def read_wav_header(data: bytes, field: str) -> WavHeader:
    found: _Format | None = None
    begin = 12
    for _ in range(MAX_CHUNKS):
        name, length = data[begin : begin + 4], int.from_bytes(data[begin + 4 : begin + 8], "little")
        begin += 8
        if begin > len(data):
            break
        if name == b"fmt ":
            found = _read_format(data[begin : begin + min(length, _MAX_DESCRIPTION_BYTES)], field)
        elif name == b"data" and found is not None:
            behind = len(data) - begin
            num_bytes = behind if _was_left_open(data, begin, length) else min(length, behind)
            return WavHeader(found, begin, num_bytes // found.bytes_at_once)
        begin += length + length % 2
    raise _refusal(field, "has no samples, or does not describe them first")


def decode_wav(data: bytes, field: str) -> Samples:
    """Return the samples at the file's own rate."""
    format_, begin, num_samples = read_wav_header(data, field)
    kind = np.dtype(_KINDS[format_.kind, format_.bits])
    values = np.frombuffer(data, kind, num_samples * format_.bytes_at_once // kind.itemsize, begin)
    if format_.bits == 24:
        values = _widen(values)
    mono = mix_down(values.reshape(num_samples, format_.num_channels).T)
    return Samples(mono, format_.sampling_rate)


def _was_left_open(data: bytes, begin: int, length: int) -> bool:
    """Return whether the lengths were never filled in: by that of the file, too, it ends with its header."""
    return length == 0 and int.from_bytes(data[4:8], "little") <= begin - 8


def _read_format(description: bytes, field: str) -> _Format:
    if len(description) < _DESCRIPTION.size:
        raise _refusal(field, "ends within the description of its samples")
    kind, num_channels, sampling_rate, _, bytes_at_once, bits = _DESCRIPTION.unpack_from(description)
    if kind == _EXTENSIBLE:
        kind = int.from_bytes(description[24:26], "little")
    if (kind, bits) not in _KINDS:
        taken = "PCM of 8, 16, 24 and 32 bits, and floats"
        raise UnsupportedPictureError(field, f"a WAV of the kind {kind} with {bits} bits; these are read: {taken}")
    found = _Format(kind, bits, num_channels, sampling_rate)
    if not 0 < found.bytes_at_once == bytes_at_once:
        raise _refusal(field, f"says that {num_channels} channels of {bits} bits take {bytes_at_once} bytes")
    return found


def _widen(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Return 24-bit samples as int32: the three bytes of each become the upper ones of four."""
    wide = np.zeros((len(values) // 3, 4), np.uint8)
    wide[:, 1:] = values.reshape(-1, 3)
    return wide.view("<i4")[:, 0]


def _refusal(field: str, what: str) -> UnreadablePictureError:
    return UnreadablePictureError(field, f"a WAV that {what}")
