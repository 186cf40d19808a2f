"""Sounds given as Python objects: which are one sound, several sounds, or samples."""

from typing import Any

import numpy as np
import pytest
import torch

from keepsight.errors import InvalidArgumentError, UnsupportedPictureError
from keepsight.frontend.intake.sound_samples import Samples
from keepsight.frontend.intake.take_sound import are_sounds, take_sound

VALUES = np.linspace(-1, 1, 50, dtype=np.float32)


@pytest.mark.parametrize(
    "source",
    [VALUES, VALUES.astype(np.float64), torch.from_numpy(VALUES), VALUES.tolist(), VALUES[None], VALUES[:, None]],
    ids=["array", "doubles", "tensor", "list", "one channel", "one channel behind"],
)
def test_samples_are_taken_in_any_form_and_copied(source: Any) -> None:
    for given, rate in ((source, 16_000), ((source, 8_000.0), 8_000)):
        taken = take_sound(given, "audio", 16_000)
        assert isinstance(taken, Samples)
        assert np.array_equal(taken.values, VALUES)
        assert taken.sampling_rate == rate
        assert not taken.values.flags.writeable
        assert not np.shares_memory(taken.values, VALUES)
        assert not are_sounds(given)


def test_of_several_channels_the_mean_is_taken() -> None:
    both = np.stack([VALUES, np.zeros_like(VALUES)])
    for source in (both, both.T):
        taken = take_sound((source, 16_000), "audio", 16_000)
        assert isinstance(taken, Samples)
        assert np.array_equal(taken.values, VALUES / 2)


def test_the_bytes_of_a_file_are_one_sound_and_a_list_of_them_several() -> None:
    assert take_sound(bytearray(b"a sound"), "audio", 16_000) == b"a sound"
    assert not are_sounds(b"a sound")
    assert are_sounds([b"a sound", VALUES, (VALUES, 8_000)])
    assert are_sounds([])


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (5, InvalidArgumentError, "must be a URL, a file's bytes"),
        ([], InvalidArgumentError, "not list"),
        ((VALUES * 9).astype(np.int16), UnsupportedPictureError, r"int16 \[50\] is not a sound; .* divided by 32768"),
        (VALUES[None, None], UnsupportedPictureError, r"float32 \[1, 1, 50\] is not a sound"),
        ((VALUES, 8_000.5), InvalidArgumentError, "sampling rate must be a whole number, not 8000.5"),
        ((VALUES, float("nan")), InvalidArgumentError, "sampling rate must be a whole number, not nan"),
        ((VALUES, -1), InvalidArgumentError, "a sound with -1 samples per second"),
        (VALUES * np.inf, InvalidArgumentError, "a sound with a NaN, an infinity, or a sample beyond"),
    ],
)
def test_an_invalid_sound_is_refused_by_its_field(source: Any, error: type[InvalidArgumentError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        take_sound(source, "audio", 16_000)
    assert caught.value.field == "audio"
