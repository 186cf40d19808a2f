"""Films given as Python objects: which are one film, several films, or frames."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from keepsight.errors import InvalidArgumentError, UnsupportedPictureError
from keepsight.frontend.intake.take_film import are_films, take_film
from keepsight.media import Excerpt, Timeline

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)
# As vLLM's loaders describe frames that they sampled.
SAMPLED: dict[str, Any] = {"fps": 24.0, "total_num_frames": 40, "frames_indices": [0, 13, 13, 26, 39], "duration": 1.7}


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
    taken, timeline = take_film(source, "video")
    assert isinstance(taken, np.ndarray)
    assert np.array_equal(taken, FRAMES)
    assert timeline == Timeline(5, 24.0)
    assert not taken.flags.writeable
    assert not np.shares_memory(taken, FRAMES)
    assert not are_films(source)


def test_how_many_frames_a_second_there_are_may_be_said_beside_them() -> None:
    rates: list[tuple[object, float]] = [(10, 10.0), (np.float32(12.5), 12.5), (np.int64(3), 3.0), (None, 24.0)]
    for rate, expected in rates:
        taken, timeline = take_film((FRAMES, {"fps": rate}), "video")
        assert (len(taken), timeline) == (5, Timeline(5, expected))
        assert not are_films((FRAMES, {"fps": rate}))


def test_metadata_of_all_frames_says_no_more_than_their_rate() -> None:
    plain: dict[str, Any] = {"total_num_frames": 5, "duration": 0.2, "video_backend": "opencv", "fps": 25}
    for options in ({}, {"frames_indices": None}, {"frames_indices": range(5), "do_sample_frames": True}):
        assert take_film((FRAMES, plain | options), "video")[1] == Timeline(5, 25.0)


def test_metadata_may_be_of_transformers_own_kind() -> None:
    assert take_film((FRAMES, VideoMetadata(5, fps=10)), "video")[1] == Timeline(5, 10.0)
    sampled = VideoMetadata(40, frames_indices=SAMPLED["frames_indices"])
    assert take_film((FRAMES, sampled), "video")[1] == Timeline(5, 24.0, Excerpt((0, 13, 13, 26, 39), 40))


@pytest.mark.parametrize("options", [{}, {"do_sample_frames": False}, {"do_sample_frames": None, "video_backend": "x"}])
def test_frames_that_a_loader_has_sampled_already_keep_their_numbers_in_its_film(options: dict[str, Any]) -> None:
    for indices in ([0, 13, 13, 26, 39], np.array([0, 13, 13, 26, 39])):
        metadata = SAMPLED | {"frames_indices": indices} | options
        assert take_film((FRAMES, metadata), "video")[1] == Timeline(5, 24.0, Excerpt((0, 13, 13, 26, 39), 40))


def test_all_frames_may_be_shown_without_sampling() -> None:
    assert take_film((FRAMES, {"do_sample_frames": False}), "video")[1] == Timeline(
        5, 24.0, Excerpt((0, 1, 2, 3, 4), 5)
    )


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
        (
            (FRAMES, {"total_num_frames": 9}),
            InvalidArgumentError,
            r"say in frames_indices which of total_num_frames \(9\)",
        ),
        ((FRAMES, {"total_num_frames": "9"}), InvalidArgumentError, "a total_num_frames of '9': it must be an integer"),
        ((FRAMES, SAMPLED | {"total_num_frames": 40.0}), InvalidArgumentError, "of 40.0: it must be an integer"),
        ((FRAMES, SAMPLED | {"total_num_frames": 10**400}), InvalidArgumentError, f"at most {2**53}$"),
        ((FRAMES, {"frames_indices": [0, 1, 2, 3]}), InvalidArgumentError, "each of its 5 frames is"),
        ((FRAMES, {"frames_indices": [0, 1, 2, 3, 5]}), InvalidArgumentError, "each of its 5 frames is"),
        ((FRAMES, {"frames_indices": "first"}), InvalidArgumentError, "integers as frames_indices, not 'first'"),
        (
            (FRAMES, SAMPLED | {"frames_indices": torch.arange(5)}),
            InvalidArgumentError,
            r"a list or an array of integers as frames_indices, not tensor\(",
        ),
        ((FRAMES, SAMPLED | {"frames_indices": [[0], [1, 2]]}), InvalidArgumentError, r"not \[\[0\], \[1, 2\]\]"),
        ((FRAMES, SAMPLED | {"frames_indices": np.array(5)}), InvalidArgumentError, r"not array\(5\)"),
        ((FRAMES, SAMPLED | {"frames_indices": np.linspace(0, 39, 5)}), InvalidArgumentError, "integers as frames_ind"),
        ((b"a film", {"fps": 3}), InvalidArgumentError, "must have no metadata beside it: a file says its rate itself"),
        ((FRAMES, SAMPLED | {"do_sample_frames": True}), InvalidArgumentError, "sampled already"),
    ],
)
def test_an_invalid_film_is_refused_by_its_field(source: Any, error: type[InvalidArgumentError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        take_film(source, "video")
    assert caught.value.field == "video"
