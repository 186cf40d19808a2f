"""Films given as Python objects: which are one film, several films, or frames."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from keepsight.errors import InvalidArgumentError, UnsupportedPictureError
from keepsight.frontend.intake.take_film import are_films, take_film

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)


@pytest.mark.parametrize(
    "source",
    [
        FRAMES,
        FRAMES.transpose(0, 3, 1, 2),
        torch.from_numpy(FRAMES),
        list(FRAMES),
        list(map(torch.from_numpy, FRAMES)),
        [Image.fromarray(frame) for frame in FRAMES],
    ],
    ids=["array", "channels before rows", "tensor", "arrays", "tensors", "pictures"],
)
def test_frames_are_taken_in_any_form_and_copied(source: Any) -> None:
    taken, rate = take_film(source, "video")
    assert isinstance(taken, np.ndarray)
    assert np.array_equal(taken, FRAMES)
    assert rate == 24
    assert not taken.flags.writeable
    assert not np.shares_memory(taken, FRAMES)
    assert not are_films(source)


def test_how_many_frames_a_second_there_are_may_be_said_beside_them() -> None:
    for options, rate in (({"fps": 10}, 10.0), ({"total_num_frames": 5}, 24.0)):
        taken, found = take_film((FRAMES, options), "video")
        assert (len(taken), found) == (5, rate)
        assert not are_films((FRAMES, options))


def test_the_bytes_of_a_file_are_one_film_and_a_list_of_them_several() -> None:
    assert take_film(bytearray(b"a film"), "video")[0] == b"a film"
    assert not are_films(b"a film")
    assert are_films([b"a film", FRAMES, (FRAMES, {"fps": 10})])
    assert are_films([])


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (5, InvalidArgumentError, "must be a URL, a file's bytes"),
        ([], InvalidArgumentError, "not list"),
        (FRAMES[0], UnsupportedPictureError, r"uint8 \[4, 6, 3\] is not a film"),
        (FRAMES.astype(np.float32), UnsupportedPictureError, "float32"),
        ([FRAMES[0], FRAMES[1][:2]], UnsupportedPictureError, r"one shape, not \[\(2, 6, 3\), \(4, 6, 3\)\]"),
        ((FRAMES, {"fps": 0}), InvalidArgumentError, "fps of 0: it must be a number above 0"),
        ((FRAMES, {"fps": "fast"}), InvalidArgumentError, "fps of 'fast'"),
    ],
)
def test_an_invalid_film_is_refused_by_its_field(source: Any, error: type[InvalidArgumentError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        take_film(source, "video")
    assert caught.value.field == "video"
