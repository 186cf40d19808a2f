"""A film's geometry read before decoding equals what decoding gives; any input is a film or refused."""

import io
import random
import sys

import av
import numpy as np
import pytest

from keepsight.errors import KeepsightError, PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake import read_film as reading
from keepsight.frontend.intake.read_film import read_film
from keepsight.media import Geometry, Timeline
from tests.frontend.sample_documents import Page, write_pdf
from tests.frontend.sample_films import (
    HEIGHT,
    KINDS,
    RATE,
    WIDTH,
    covered,
    cut_between_key_frames,
    drawn_frames,
    film,
    recording,
    trimmed,
)
from tests.frontend.sample_pictures import encode, random_picture
from tests.frontend.sample_sounds import wav

FIELD = "messages[0].content[1]"


def by_reference(data: bytes) -> Geometry:
    """Decode a film as transformers' `read_video_pyav` does."""
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        assert stream.average_rate
        frames = list(container.decode(video=0))
        return Geometry(frames[0].width, frames[0].height, Timeline(len(frames), float(stream.average_rate)))


@pytest.mark.parametrize(("format_", "codec"), KINDS)
def test_a_film_has_the_frames_that_decoding_gives(format_: str, codec: str) -> None:
    geometry = read_film(film(format_, codec), FIELD)
    assert geometry == Geometry(WIDTH, HEIGHT, Timeline(20, float(RATE))) == by_reference(film(format_, codec))


@pytest.mark.parametrize(("rotation", "is_upright"), [(90, False), (180, True), (270, False), (-90, False), (30, True)])
def test_a_film_of_a_phone_is_as_large_as_it_is_shown(rotation: int, is_upright: bool) -> None:
    geometry = read_film(film(rotation=rotation), FIELD)
    assert (geometry.width, geometry.height) == ((WIDTH, HEIGHT) if is_upright else (HEIGHT, WIDTH))


@pytest.mark.parametrize("group", ["5", "250"])
def test_frames_that_an_editor_cut_off_are_none_whatever_the_header_counts(group: str) -> None:
    data = trimmed(film(codec="libx264", g=group), 8)
    assert av.open(io.BytesIO(data)).streams.video[0].frames == 20
    assert read_film(data, FIELD) == by_reference(data)
    assert read_film(data, FIELD).timeline == Timeline(8, float(RATE))


@pytest.mark.parametrize(("format_", "num_between"), [("matroska", 3), ("matroska", 0), ("avi", 0)])
def test_packets_before_the_first_key_frame_are_no_frames(format_: str, num_between: int) -> None:
    data = cut_between_key_frames(format_, num_between)
    assert read_film(data, FIELD) == by_reference(data)


def test_a_cover_is_no_film_though_it_comes_first() -> None:
    cover = encode(random_picture("RGB", (30, 20)), "JPEG")
    assert read_film(covered(film(), cover), FIELD) == read_film(film(), FIELD)
    assert av.open(io.BytesIO(covered(film(), cover))).streams.video[0].width == 30


@pytest.mark.parametrize(("format_", "codec"), KINDS[:-1])
def test_a_title_may_be_in_any_encoding(format_: str, codec: str) -> None:
    in_latin = film(format_, codec, title="Gr_n").replace(b"Gr_n", b"Gr\xfcn")
    assert b"Gr\xfcn" in in_latin
    assert read_film(in_latin, FIELD) == read_film(film(format_, codec), FIELD)


def test_a_film_whose_frames_come_irregularly_has_their_average_rate() -> None:
    times = (0, 33, 71, 104, 150, 183, 5000, 5033, 5071, 9000)
    assert read_film(recording(times), FIELD).timeline == Timeline(10, 1.0)
    assert read_film(recording(times[:1]), FIELD).timeline == Timeline(1, 24.0)


def test_an_array_is_a_film_of_24_frames_a_second_unless_somebody_says_otherwise() -> None:
    assert read_film(drawn_frames(), FIELD) == Geometry(WIDTH, HEIGHT, Timeline(20, 24.0))
    assert read_film(drawn_frames(), FIELD, timeline=Timeline(20, 30.0)).timeline == Timeline(20, 30.0)


@pytest.mark.parametrize("shape", [(48, 64, 3), (9, 48, 64, 4), (9, 3, 48, 64)])
def test_an_array_of_another_shape_is_no_film(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedPictureError, match=r"is not a film; allowed are uint8 \[frames, height, width, 3\]"):
        read_film(np.zeros(shape, np.uint8), FIELD)


# Refusals -----------------------------------------------------------------------------------------------------

PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"


@pytest.mark.parametrize(
    "data", [b"", b"no film", PLAYLIST, b"ffconcat version 1.0\nfile /etc/passwd\n", b"\x89PNG\r\n\x1a\n" + bytes(99)]
)
def test_what_is_none_of_the_formats_never_reaches_ffmpeg(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "open", None)
    with pytest.raises(UnreadablePictureError, match="bytes that are none of MP4, MOV, WebM, MKV, AVI, GIF"):
        read_film(data, FIELD)


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (encode(random_picture("RGB", (8, 8)), "PNG"), ": a picture, to be sent as one (image_url)"),
        (wav(64), ": a sound, to be sent as one (audio_url)"),
        (write_pdf(Page()), ": a PDF, to be sent as one (file)"),
        (b"no film", ""),
    ],
)
def test_what_is_no_film_is_said_if_it_is_known(data: bytes, hint: str) -> None:
    with pytest.raises(UnreadablePictureError) as refused:
        read_film(data, FIELD)
    assert refused.value.message.endswith(f"AVI, GIF{hint}")


def test_a_format_behind_another_s_first_bytes_is_not_found_out() -> None:
    for first_bytes in (b"\0\0\0\x08free", b"\x1aE\xdf\xa3", b"RIFF\xff\0\0\0AVI ", b"GIF89a"):
        with pytest.raises(UnreadablePictureError):
            read_film(first_bytes + PLAYLIST, FIELD)


def test_a_codec_that_films_seldom_have_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedPictureError, match="a film in ffv1; these are read: gif, h263, h264"):
        read_film(film("matroska", "ffv1"), FIELD)


def test_limits_are_those_of_a_frame_and_of_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (film(), drawn_frames()):
        with pytest.raises(PictureTooLargeError, match="64 x 48 pixels have 3072, at most 3071 are allowed"):
            read_film(source, FIELD, max_pixels=3071)
    monkeypatch.setattr(reading, "MAX_FRAMES", 19)
    for source in (film(), drawn_frames()):
        with pytest.raises(PictureTooLargeError, match="more than 19 frames"):
            read_film(source, FIELD)


@pytest.mark.parametrize(("format_", "codec"), KINDS)
@pytest.mark.parametrize("width", [WIDTH, WIDTH // 4, WIDTH // 4 + 2])
def test_a_frame_may_have_as_many_pixels_as_the_limit_says(format_: str, codec: str, width: int) -> None:
    """The padding that a decoder adds to a frame does not count."""
    geometry = read_film(film(format_, codec, width=width), FIELD, max_pixels=width * HEIGHT)
    assert (geometry.width, geometry.height) == (width, HEIGHT)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(UnreadablePictureError, match="frames per second"):
        read_film(drawn_frames(), FIELD, timeline=Timeline(20, rate))


def test_where_pyav_is_missing_files_are_refused_and_arrays_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert read_film(drawn_frames(), FIELD).timeline
    with pytest.raises(UnsupportedPictureError, match=r"pip install 'keepsight\[video\]'"):
        read_film(film(), FIELD)


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_half_a_film_is_refused_where_that_can_be_told(kept: float) -> None:
    data = film()
    with pytest.raises(UnreadablePictureError):
        read_film(data[: int(kept * len(data))], FIELD)


def test_whatever_is_done_to_a_film_it_is_a_film_or_refused() -> None:
    chance, outcomes = random.Random(0), set()
    for _ in range(600):
        data = bytearray(film(*chance.choice(KINDS)))
        for _ in range(chance.choice([1, 3, 30])):
            data[chance.randrange(chance.choice([400, len(data)]))] = chance.randrange(256)
        try:
            outcomes.add(read_film(bytes(data[: chance.choice([-1, len(data) // 2])]), FIELD).timeline is not None)
        except KeepsightError as error:
            outcomes.add(str(error).startswith(FIELD))
    assert outcomes == {True}
