"""The requested frames equal those of the reference's PyAV reader, each at its place in its moment."""

import io
from contextlib import suppress

import av
import numpy as np
import pytest

from keepsight.errors import UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_film import FilmArray, FilmSource
from keepsight.frontend.pixels.decode_film import decode_film
from keepsight.frontend.pixels.make_pixels import FilmJob
from keepsight.frontend.pixels.preprocess_image import resize_pixels
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import Moment
from keepsight.requests import Pixels
from tests.frontend.sample_films import HEIGHT, KINDS, WIDTH, drawn_frames, film, trimmed

FIELD = "messages[0].content[1]"


def all_frames(data: bytes) -> FilmArray:
    """Decode all frames as `read_video_pyav` of transformers does."""
    with av.open(io.BytesIO(data), "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(np.uint8)


def decoded(source: FilmSource, *wanted: int) -> dict[int, Pixels]:
    return dict(decode_film(source, set(wanted), FIELD))


@pytest.mark.parametrize(("format_", "codec"), KINDS)
def test_frames_are_those_of_the_reference_and_no_others_come(format_: str, codec: str) -> None:
    data = film(format_, codec)
    expected = all_frames(data)
    frames = decoded(data, 0, 3, 4, 19)
    assert list(frames) == [0, 3, 4, 19]
    for number, pixels in frames.items():
        assert np.array_equal(pixels, expected[number])
    assert abs(float(frames[19].mean()) - float(drawn_frames()[19].mean())) < 10


def test_frames_of_an_array_are_its_own() -> None:
    frames = decoded(drawn_frames(), 2, 19)
    assert all(np.array_equal(pixels, drawn_frames()[number]) for number, pixels in frames.items())


@pytest.mark.parametrize(("rotation", "turns"), [(90, 1), (180, 2), (270, 3), (30, 0)])
def test_films_of_phones_are_turned_upright(rotation: int, turns: int) -> None:
    [pixels] = decoded(film(rotation=rotation), 5).values()
    assert np.array_equal(pixels, np.rot90(all_frames(film())[5], turns))
    assert pixels.shape == ((WIDTH, HEIGHT, 3) if turns % 2 else (HEIGHT, WIDTH, 3))


def test_nothing_is_decoded_behind_the_last_frame_that_is_wanted() -> None:
    data = film(g="1")
    broken = data[:-1500] + bytes(500) + data[-1000:]
    assert np.array_equal(decoded(broken, 2)[2], all_frames(data)[2])


def test_a_film_with_fewer_frames_than_it_said_is_refused() -> None:
    with pytest.raises(UnreadablePictureError, match="has no frame 19: only 8 can be decoded"):
        decoded(trimmed(film(codec="libx264"), 8), 3, 19)


def test_a_film_that_is_damaged_in_the_middle_is_refused_or_has_its_frames() -> None:
    data = film("avi")
    for place in range(300, len(data), 97):
        with suppress(UnreadablePictureError, UnsupportedPictureError):
            assert list(decoded(data[:place] + b"\xff\0\xff" + data[place + 3 :], 0, 19)) == [0, 19]


# Moments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [film(codec="libx264"), drawn_frames()], ids=["mp4", "array"])
@pytest.mark.parametrize(("height", "width"), [(32, 96), (HEIGHT, WIDTH)])
def test_the_second_frame_of_a_moment_lies_below_the_first(source: FilmSource, height: int, width: int) -> None:
    frames = all_frames(source) if isinstance(source, bytes) else source
    moments = {"b": Moment(7, 12), "a": Moment(0, 7), "alone": Moment(19, 19)}
    config = ImageProcessorConfig(height=height, width=width)
    pixels = FilmJob(source, FIELD, moments, config).run().pixels
    assert list(pixels) == list(moments)
    for name, moment in moments.items():
        both = [resize_pixels(frames[number], config) for number in (moment.first, moment.last)]
        assert pixels[name].dtype == np.uint8
        assert np.array_equal(pixels[name], np.concatenate(both))
        assert pixels[name].base is None
