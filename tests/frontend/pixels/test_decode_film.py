"""The requested frames equal those of the reference's PyAV reader, each at its place in its moment."""

import io
from contextlib import suppress

import av
import numpy as np
import pytest

from keepsight.errors import UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_film import FilmArray, FilmSource
from keepsight.frontend.intake.read_film import read_film
from keepsight.frontend.pixels.decode_film import decode_film
from keepsight.frontend.pixels.make_pixels import FilmJob
from keepsight.frontend.pixels.preprocess_image import resize_pixels
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import Moment
from keepsight.requests import Pixels
from tests.frontend.sample_films import (
    HEIGHT,
    KINDS,
    WIDTH,
    cut_between_key_frames,
    drawn_frames,
    film,
    repacked,
    trimmed,
)

FIELD = "messages[0].content[1]"


def all_frames(data: bytes) -> FilmArray:
    """Decode all frames as `read_video_pyav` of transformers does."""
    with av.open(io.BytesIO(data), "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(np.uint8)


# A packet of MPEG-4, in films of Xvid, that says: nothing has changed.
NOT_CODED = b"\0\0\1\xb6\x50\x9f"


def hidden(packet: bytes) -> bytes:
    """Return a packet of VP8 whose frame others refer to, but which is not shown."""
    return bytes([packet[0] & ~16]) + packet[1:]


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


@pytest.mark.parametrize(
    "lacking",
    [
        repacked(film("webm", "libvpx"), "webm", lambda number, packet: hidden(packet) if number == 7 else packet),
        repacked(film("avi", bf="0"), "avi", lambda number, packet: NOT_CODED if number == 7 else packet),
        cut_between_key_frames("avi", 3),
    ],
    ids=["a frame that is not shown", "a frame that is not coded", "a packet without its key frame"],
)
def test_the_last_frame_is_repeated_for_packets_that_give_none(lacking: bytes) -> None:
    timeline = read_film(lacking, FIELD).timeline
    assert timeline is not None
    expected, counted = all_frames(lacking), range(timeline.num_frames)
    assert len(expected) == len(counted) - 1
    frames = decoded(lacking, *counted)
    assert list(frames) == list(counted)
    assert all(np.array_equal(frames[number], shown) for number, shown in enumerate(expected))
    assert np.array_equal(frames[counted[-1]], expected[-1])


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
