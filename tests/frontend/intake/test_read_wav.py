"""A WAV is read as soundfile reads it; any other input is refused."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import KeepsightError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.read_wav import decode_wav, is_wav, read_wav_header
from tests.frontend.sample_sounds import RATE, as_floats, drawn, wav, wav_of

FIELD = "messages[0].content[1]"


@pytest.mark.parametrize("num_channels", [1, 2, 6])
def test_python_s_own_writer_is_read_as_it_wrote(num_channels: int) -> None:
    header = read_wav_header(wav(900, num_channels), FIELD)
    assert (header.format.sampling_rate, header.num_samples) == (RATE, 900)
    assert np.array_equal(decode_wav(wav(900, num_channels), FIELD).values, as_floats(drawn(900, num_channels)))


@pytest.mark.parametrize(
    ("kind", "bits", "values", "expected"),
    [
        (1, 8, bytes([0, 64, 128, 255]), [-1, -0.5, 0, 127 / 128]),
        (1, 16, np.array([-32768, 0, 16384, 32767], "<i2").tobytes(), [-1, 0, 0.5, 32767 / 32768]),
        (1, 24, bytes([0, 0, 0x80, 0, 0, 0, 0, 0, 0x40, 1, 0, 0]), [-1, 0, 0.5, 2**-23]),
        (1, 32, np.array([-(2**31), 0, 2**30, 1], "<i4").tobytes(), [-1, 0, 0.5, 2**-31]),
        (3, 32, np.array([-1, 0, 0.5, 3], "<f4").tobytes(), [-1, 0, 0.5, 3]),
        (3, 64, np.array([-1, 0, 0.5, 0.1], "<f8").tobytes(), [-1, 0, 0.5, np.float32(0.1)]),
    ],
)
def test_integers_are_parts_of_full_loudness_and_floats_are_themselves(
    kind: int, bits: int, values: bytes, expected: list[float]
) -> None:
    assert decode_wav(wav_of(values, kind, bits), FIELD).values.tolist() == expected
    extensible = wav_of(values, 0xFFFE, bits, extension=bytes([22, 0]) + bytes(6) + bytes([kind, 0]) + bytes(14))
    assert decode_wav(extensible, FIELD).values.tolist() == expected


@pytest.mark.parametrize("announced", [0xFFFFFFFF, 10_000])
def test_what_lies_there_counts_and_not_what_is_announced(announced: int) -> None:
    data = wav(900)
    place = data.index(b"data") + 4
    streamed = data[:place] + announced.to_bytes(4, "little") + data[place + 4 :]
    assert np.array_equal(decode_wav(streamed, FIELD).values, decode_wav(data, FIELD).values)
    assert read_wav_header(data[:-1], FIELD).num_samples == 899


@pytest.mark.parametrize("whole", [0, 8, 36])
def test_of_a_file_that_was_never_closed_all_that_lies_there_is_read(whole: int) -> None:
    data = wav(900)
    left_open = data[:4] + whole.to_bytes(4, "little") + data[8:40] + bytes(4) + data[44:]
    assert np.array_equal(decode_wav(left_open, FIELD).values, decode_wav(data, FIELD).values)
    closed = wav_of(b"") + b"LIST\4\0\0\0more"
    assert read_wav_header(closed[:4] + (len(closed) - 8).to_bytes(4, "little") + closed[8:], FIELD).num_samples == 0


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (wav()[:12], UnreadablePictureError, "has no samples, or does not describe them first"),
        (wav()[:12] + b"LIST\0\0\0\0" * 2000, UnreadablePictureError, "has no samples"),
        (wav()[:12] + b"data\0\0\0\0", UnreadablePictureError, "does not describe them first"),
        (wav()[:12] + b"fmt \x04\0\0\0\1\0\1\0", UnreadablePictureError, "ends within the description"),
        (wav_of(b"", 7, 8), UnsupportedPictureError, "a WAV of the kind 7 with 8 bits; these are read: PCM of 8"),
        (wav_of(b"", 1, 16, 0), UnreadablePictureError, "says that 0 channels of 16 bits take 0 bytes"),
    ],
)
def test_what_is_wrong_with_a_header_is_said(data: bytes, error: type[KeepsightError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_wav_header(data, FIELD)


@given(st.binary(max_size=200))
def test_any_bytes_behind_the_first_are_a_wav_or_refused(behind: bytes) -> None:
    _read_or_refuse(wav()[:12] + behind)


@given(st.lists(st.tuples(st.integers(4, 60), st.integers(0, 255)), max_size=6), st.integers(0, 600))
def test_whatever_is_done_to_a_wav_it_is_one_or_refused(changes: list[tuple[int, int]], kept: int) -> None:
    data = bytearray(wav(120, 2))
    for place, value in changes:
        data[place] = value
    _read_or_refuse(bytes(data[:kept]))


def _read_or_refuse(data: bytes) -> None:
    with suppress(UnreadablePictureError, UnsupportedPictureError):
        if is_wav(data):
            samples = decode_wav(data, FIELD).values
            assert samples.dtype == np.float32
            assert samples.shape == (read_wav_header(data, FIELD).num_samples,)
