"""Messages arrive as they were sent, and a worker's answer is accepted only within what its job allows."""

import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.borrowed import BorrowedProcessor
from keepsight.errors import (
    CheckpointConfigError,
    ModelNotFoundError,
    PictureError,
    PictureTooLargeError,
    UnreadablePictureError,
)
from keepsight.frontend.intake.read_document import MAX_TEXT_BYTES, ShownPage
from keepsight.frontend.pixels.make_pixels import (
    BorrowedJob,
    BorrowedLook,
    DocumentLook,
    FilmJob,
    FilmLook,
    Job,
    Made,
    PictureJob,
    SoundJob,
    SoundLook,
)
from keepsight.frontend.pixels.picture_wire import (
    MAX_HEADER_BYTES,
    MAX_MESSAGE_CHARACTERS,
    receive_answer,
    receive_job,
    send_error,
    send_job,
    send_result,
)
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import CropBox, Geometry, Moment, Part, PictureLayout, Timeline
from keepsight.pixels import carry_arrays, carry_samples
from keepsight.requests import Pixels
from keepsight.shown_sizes import ShownSizes

SOON = 20
FIELD = "messages[0].content[1]"
JOB = PictureJob(b"bytes", FIELD, {"whole": None, "crop": CropBox(0, 0, 2, 2)}, ImageProcessorConfig(height=2, width=3))


@contextmanager
def sent_by(send: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """Yield one end of a connection; the other end runs `send` and then closes."""
    ours, theirs = socket.socketpair()
    ours.settimeout(SOON)

    def run() -> None:
        # The reader may close before everything is sent.
        with theirs, suppress(BrokenPipeError, ConnectionResetError):
            send(theirs)

    thread = threading.Thread(target=run)
    thread.start()
    with ours:
        yield ours
    thread.join(SOON)
    assert not thread.is_alive()


def answer_to(job: Job, send: Callable[[socket.socket], None]) -> Any:
    with sent_by(send) as connection:
        return receive_answer(connection, job)


def framed(header: object) -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return len(encoded).to_bytes(4) + encoded


crops = st.none() | st.builds(CropBox, *[st.integers(0, 2**31)] * 4)
moments = st.builds(Moment, *[st.integers(0, 2**31)] * 2)
sources = st.binary() | st.binary(min_size=1).map(lambda data: data * 10_000)
configs = st.builds(
    ImageProcessorConfig,
    height=st.integers(1, 1000),
    image_mean=st.tuples(*[st.floats(0, 1)] * 3),
    rescale_factor=st.floats(1e-6, 1),
    do_pan_and_scan=st.booleans(),
    backend=st.sampled_from(["torchvision", "pil"]),
    sizes=st.none() | st.builds(ShownSizes, *[st.integers(1, 16)] * 2, st.integers(1, 99), st.integers(99, 2**31 - 1)),
)
jobs = st.builds(PictureJob, sources, st.just("picture"), st.dictionaries(st.text(), crops, max_size=5), configs)
film_jobs = st.builds(FilmJob, sources, st.just("film"), st.dictionaries(st.text(), moments, max_size=5), configs)


@given(jobs | film_jobs)
def test_a_job_arrives_as_it_was_sent_and_the_next_one_behind_it(job: PictureJob | FilmJob) -> None:
    def send(connection: socket.socket) -> None:
        send_job(connection, job)
        send_job(connection, JOB)

    with sent_by(send) as connection:
        received = receive_job(connection)
        assert isinstance(received, PictureJob | FilmJob)
        assert received == job
        assert list(received.parts) == list(job.parts)
        assert receive_job(connection).source == JOB.source
        with pytest.raises(ConnectionError):
            receive_job(connection)


@pytest.mark.parametrize(
    ("kind", "part", "tokens_each"),
    [(PictureJob, CropBox(2**26, 0, 2**26, 2**26), 260), (FilmJob, Moment(215_998, 215_999), 12)],
)
def test_as_many_parts_as_fit_a_long_prompt_reach_a_worker(
    kind: Callable[..., PictureJob | FilmJob], part: Part, tokens_each: int
) -> None:
    parts = {f"{index:0128x}": part for index in range(262_144 // tokens_each)}
    job = kind(b"bytes", "picture", parts, ImageProcessorConfig())
    with sent_by(lambda connection: send_job(connection, job)) as connection:
        received = receive_job(connection)
        assert isinstance(received, PictureJob | FilmJob)
        assert received.parts == parts


def test_the_moments_of_a_film_arrive_as_pixels_that_are_twice_as_high() -> None:
    parts = {"a": Moment(0, 3), "b": Moment(6, 6)}
    film = FilmJob(b"bytes", FIELD, parts, ImageProcessorConfig(height=2, width=3))
    made: dict[str, Pixels] = {name: np.full((4, 3, 3), place, np.uint8) for place, name in enumerate(parts)}
    received = answer_to(film, lambda connection: send_result(connection, Made(made, (1.0, 0.5))))
    assert {name: pixels.tolist() for name, pixels in received.pixels.items()} == {
        name: pixels.tolist() for name, pixels in made.items()
    }


ARRAYS = {"pixel_values": np.full((1, 3, 2, 2), 0.5, np.float32), "token_ids": np.array([7, 8, 7], np.int32)}
LAYOUT = PictureLayout(3, columns=3, token_ids=(7, 8, 7), num_bytes=carry_arrays(ARRAYS).nbytes)
PROCESSOR = BorrowedProcessor("/folder", "digest", 7)
BORROWED = BorrowedJob(b"bytes", FIELD, {"hash": None}, PROCESSOR, LAYOUT, 4096)
BORROWED_LOOK = BorrowedLook(PROCESSOR, Geometry(640, 480), FIELD)


def test_a_borrowed_model_s_picture_and_its_arrays_arrive() -> None:
    with sent_by(lambda connection: send_job(connection, BORROWED)) as connection:
        assert receive_job(connection) == msgspec.structs.replace(BORROWED, field="picture")
    made = carry_arrays(ARRAYS)
    received = answer_to(BORROWED, lambda connection: send_result(connection, Made({"hash": made}, (1.0, 0.5))))
    np.testing.assert_array_equal(received.pixels["hash"], made)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_ids": np.array([7, 7, 7], np.int32)}, "laid out a picture differently"),
        ({"pixel_values": np.full((1, 3, 2, 2), np.nan, np.float32)}, "NaN or infinite values"),
        ({"pixel_values": np.full((1, 3, 2, 2), -np.inf, np.float32)}, "NaN or infinite values"),
    ],
)
def test_arrays_of_another_layout_or_of_no_numbers_are_not_taken(changed: dict[str, Any], message: str) -> None:
    made = Made({"hash": carry_arrays(ARRAYS | changed)}, (0.0, 0.0))
    with pytest.raises(ConnectionError, match=message):
        answer_to(BORROWED, lambda connection: send_result(connection, made))


@given(st.binary(min_size=100, max_size=100))
def test_bytes_that_are_no_arrays_are_not_taken(beginning: bytes) -> None:
    data = np.zeros(LAYOUT.num_bytes, np.uint8)
    data[:100] = np.frombuffer(beginning, np.uint8)
    data[-100:] = data[:100]
    with pytest.raises(ConnectionError, match="none of the picture"):
        answer_to(BORROWED, lambda connection: send_result(connection, Made({"hash": data}, (0.0, 0.0))))


def test_how_a_size_is_laid_out_arrives() -> None:
    with sent_by(lambda connection: send_job(connection, BORROWED_LOOK)) as connection:
        assert receive_job(connection) == msgspec.structs.replace(BORROWED_LOOK, field="picture")
    assert answer_to(BORROWED_LOOK, lambda connection: send_result(connection, LAYOUT)) == LAYOUT


DOCUMENT_LOOK = DocumentLook(b"bytes", FIELD)
PAGES = (ShownPage(Geometry(20, 30), "A report"), ShownPage(Geometry(30, 20), "é"))


def test_which_page_is_wanted_reaches_a_worker_and_what_pages_there_are_comes_back() -> None:
    page = msgspec.structs.replace(JOB, page=7)
    with sent_by(lambda connection: send_job(connection, page)) as connection:
        assert receive_job(connection) == msgspec.structs.replace(page, field="picture")
    assert answer_to(DOCUMENT_LOOK, lambda connection: send_result(connection, PAGES)) == PAGES


def test_a_document_that_cannot_be_is_not_believed() -> None:
    imagined = answer_to(DOCUMENT_LOOK, lambda connection: send_result(connection, (ShownPage(Geometry(0, 9), ""),)))
    assert isinstance(imagined, UnreadablePictureError)
    assert imagined.field == FIELD
    with pytest.raises(ConnectionError):
        answer_to(DOCUMENT_LOOK, lambda connection: send_result(connection, Geometry(640, 480)))


def test_the_longest_text_that_a_document_may_have_comes_back() -> None:
    pages = (ShownPage(Geometry(20, 30), "é" * (MAX_TEXT_BYTES // 2)),)
    assert answer_to(DOCUMENT_LOOK, lambda connection: send_result(connection, pages)) == pages


@pytest.mark.parametrize(
    "claimed",
    [
        replace(LAYOUT, tokens_per_part=4),
        replace(LAYOUT, tokens_per_part=0, token_ids=()),
        replace(LAYOUT, token_ids=(7, -1, 7)),
        replace(LAYOUT, columns=2),
        replace(LAYOUT, columns=-3),
        replace(LAYOUT, num_bytes=0),
        replace(LAYOUT, num_bytes=-1),
        replace(LAYOUT, num_crops=5),
        replace(LAYOUT, times=(1.0, 2.0)),
        replace(LAYOUT, places=(1,)),
        replace(LAYOUT, kind="audio"),
        Geometry(640, 480),
    ],
)
def test_a_layout_that_cannot_be_is_not_believed(claimed: PictureLayout | Geometry) -> None:
    with pytest.raises(ConnectionError):
        answer_to(BORROWED_LOOK, lambda connection: send_result(connection, claimed))


def test_a_checkpoint_s_fault_arrives_as_one() -> None:
    fault = CheckpointConfigError("/elsewhere", "its own processor cannot be used")
    received = answer_to(BORROWED_LOOK, lambda connection: send_error(connection, fault))
    assert isinstance(received, CheckpointConfigError)
    assert str(received) == "/folder: its own processor cannot be used"


LOOK = FilmLook(b"bytes", FIELD, 4096)


def test_a_look_at_a_film_and_what_was_seen_arrive() -> None:
    with sent_by(lambda connection: send_job(connection, LOOK)) as connection:
        assert receive_job(connection) == FilmLook(b"bytes", "film", 4096)
    seen = Geometry(64, 48, Timeline(20, 10.0))
    assert answer_to(LOOK, lambda connection: send_result(connection, seen)) == seen


@pytest.mark.parametrize(
    "claimed",
    [
        Geometry(65, 64, Timeline(20, 10.0)),
        Geometry(-1, -1, Timeline(20, 10.0)),
        Geometry(64, 48, Timeline(0, 10.0)),
        Geometry(64, 48, Timeline(2**40, 10.0)),
        Geometry(64, 48, Timeline(20, float("nan"))),
    ],
)
def test_what_no_film_may_be_is_not_believed(claimed: Geometry) -> None:
    received = answer_to(LOOK, lambda connection: send_result(connection, claimed))
    assert isinstance(received, PictureError)
    assert received.field == FIELD


MANY = b"\xdd" + (10**6).to_bytes(4) + b"\x80" * 10**6


@pytest.mark.parametrize("look", [LOOK, DOCUMENT_LOOK, BORROWED_LOOK])
@pytest.mark.parametrize(
    "claimed", [b"\xa1\xff", b"\x91" * 10**5 + b"\xc0", MANY], ids=["no text", "deep", "many objects"]
)
def test_what_no_look_finds_is_refused_before_it_takes_much_memory(look: Job, claimed: bytes) -> None:
    header = b"\x81\xa5found" + claimed
    sent = len(header).to_bytes(4) + header
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionError):
            answer_to(look, lambda connection: connection.sendall(sent))
        assert tracemalloc.get_traced_memory()[1] < 4 * 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claimed", [{}, {"found": {"width": 64, "height": 48}}, {"found": {"width": "64"}}])
def test_half_a_word_of_a_film_is_none(claimed: object) -> None:
    with pytest.raises(ConnectionError):
        answer_to(LOOK, lambda connection: connection.sendall(framed(claimed)))


SOUND, SOUND_LOOK = SoundJob(b"bytes", FIELD, {"a": None}, 16_000, 3), SoundLook(b"bytes", FIELD, 16_000)


def test_a_sound_s_job_and_its_samples_arrive() -> None:
    with sent_by(lambda connection: send_job(connection, SOUND)) as connection:
        assert receive_job(connection) == SoundJob(b"bytes", "sound", {"a": None}, 16_000, 3)
    samples = carry_samples(np.array([0, 0.5, -1], np.float32))
    received = answer_to(SOUND, lambda connection: send_result(connection, Made({"a": samples}, (1.0, 0.0))))
    assert np.array_equal(received.pixels["a"], samples)


def test_samples_that_no_sound_has_are_not_believed() -> None:
    samples = carry_samples(np.array([0, float("nan"), -1], np.float32))
    received = answer_to(SOUND, lambda connection: send_result(connection, Made({"a": samples}, (1.0, 0.0))))
    assert isinstance(received, PictureError)
    assert received.field == FIELD


def test_a_look_at_a_sound_and_its_length_arrive_unless_no_sound_may_have_it() -> None:
    with sent_by(lambda connection: send_job(connection, SOUND_LOOK)) as connection:
        assert receive_job(connection) == SoundLook(b"bytes", "sound", 16_000)
    for length, is_believed in ((480_000, True), (0, False), (-1, False), (2**40, False)):
        claimed = Geometry(num_samples=length)
        received = answer_to(SOUND_LOOK, lambda connection: send_result(connection, claimed))  # noqa: B023
        assert received == claimed if is_believed else isinstance(received, PictureError)
    with pytest.raises(ConnectionError):
        answer_to(SOUND_LOOK, lambda connection: send_result(connection, Geometry(64, 48, Timeline(20, 10.0))))


def test_pixels_arrive_under_the_names_of_their_parts_in_memory_of_their_own() -> None:
    made: dict[str, Pixels] = {
        media_hash: np.random.default_rng(seed).integers(0, 256, (2, 3, 3), dtype=np.uint8)
        for seed, media_hash in enumerate(JOB.parts)
    }
    received = answer_to(JOB, lambda connection: send_result(connection, Made(made, (1.0, 0.5))))
    assert received.seconds == (1.0, 0.5)
    assert list(received.pixels) == ["whole", "crop"]
    for media_hash, pixels in received.pixels.items():
        assert np.array_equal(pixels, made[media_hash])
        assert pixels.base is None


@pytest.mark.parametrize("error", [UnreadablePictureError("picture", "torn"), PictureTooLargeError("picture", "huge")])
def test_a_picture_s_error_arrives_under_the_name_that_the_caller_knows(error: UnreadablePictureError) -> None:
    received = answer_to(JOB, lambda connection: send_error(connection, error))
    assert type(received) is type(error)
    assert (received.field, received.message, received.status) == (FIELD, error.message, error.status)


@pytest.mark.parametrize("error", [ModelNotFoundError("model", "no"), KeyError("x"), SystemError()])
def test_any_other_error_is_none_of_the_caller_s(error: Exception) -> None:
    received = answer_to(JOB, lambda connection: send_error(connection, error))
    assert type(received) is RuntimeError
    assert type(error).__name__ in str(received)


def test_an_endless_message_is_cut() -> None:
    error = UnreadablePictureError("picture", "Ω" * MAX_HEADER_BYTES)
    received = answer_to(JOB, lambda connection: send_error(connection, error))
    assert received.message == "Ω" * MAX_MESSAGE_CHARACTERS


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0\0",
        (MAX_HEADER_BYTES + 1).to_bytes(4) + bytes(MAX_HEADER_BYTES + 1),
        b"\xff" * 4,
        framed({"error": None}),
        framed({"error": None}) + bytes(2 * 2 * 3 * 3 - 1),
        framed({"error": 7}),
        framed({"error": "KeyError", "message": None}),
        framed([]),
        framed({})[:-1],
        b"\0\0\0\1\xc1",
    ],
)
def test_an_answer_that_is_none_is_no_answer(sent: bytes) -> None:
    with pytest.raises(ConnectionError):
        answer_to(JOB, lambda connection: connection.sendall(sent))


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda data: len(data).to_bytes(4) + data))
def test_whatever_comes_it_is_pixels_of_the_right_shape_or_an_error_or_none(sent: bytes) -> None:
    try:
        received = answer_to(JOB, lambda connection: connection.sendall(sent))
    except ConnectionError:
        return
    if isinstance(received, Made):
        assert [pixels.shape for pixels in received.pixels.values()] == [(2, 3, 3)] * 2
    else:
        assert isinstance(received, Exception)
