"""Workers give the same results as this process; whatever happens to them, each job gets one answer."""

import asyncio
import errno
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.concurrency import run_in_threadpool

from keepsight.config import Config
from keepsight.errors import KeepsightError, MediaWorkersLostError, PictureTooLargeError, UnreadablePictureError
from keepsight.frontend.identity.pan_and_scan import plan_crops
from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.frontend.intake.read_document import read_document
from keepsight.frontend.intake.read_film import read_film
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.frontend.intake.read_sound import read_sound
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixels import media_worker, media_workers
from keepsight.frontend.pixels.make_pixels import DocumentLook, FilmJob, FilmLook, Made, PictureJob, SoundJob, SoundLook
from keepsight.frontend.pixels.media_workers import MediaWorkers
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import Moment
from keepsight.observe.catalogue import DECODED
from keepsight.observe.process_memory import children_of, resident_bytes
from keepsight.program_identity import check_program_is, identify_program
from keepsight.requests import CarriedPixels
from keepsight.sampling_params import SamplingParams
from tests.counted import counted
from tests.drawn import ask, to_data_url
from tests.frontend.misbehaving_worker import BLUNDER, CRASH, DEVOUR, IMPOSE, SPIN, STOP
from tests.frontend.sample_documents import Page, stream, write_pdf
from tests.frontend.sample_films import KINDS, drawn_frames, film
from tests.frontend.sample_pictures import BASE, CROPPING, all_cases, encode, random_picture
from tests.frontend.sample_sounds import RATE, sound, wav
from tests.wait_until import wait_until

ROOT = Path(__file__).parents[3]
SOON = 20  # Seconds; everything that is awaited takes much less.
FIELD = "messages[0].content[1]"


class CountedWorkers(MediaWorkers):
    def __init__(self, num_workers: int, check_program: Callable[[], object] = lambda: None) -> None:
        super().__init__(num_workers, self._count, check_program)
        self.num_crashes = 0

    def _count(self) -> None:
        self.num_crashes += 1


Start = Callable[..., CountedWorkers]


@pytest.fixture(scope="module")
def workers() -> Iterator[MediaWorkers]:
    with closing(MediaWorkers(2)) as workers:
        workers.start()
        yield workers
        workers.check_invariants()


@pytest.fixture
def start() -> Iterator[Start]:
    """Create workers of the test's own, which it may kill and close."""
    started: list[CountedWorkers] = []

    def start(num_workers: int, check_program: Callable[[], object] = lambda: None) -> CountedWorkers:
        started.append(CountedWorkers(num_workers, check_program))
        return started[-1]

    children = children_of_ours()
    yield start
    for workers in started:
        workers.close()
        workers.check_invariants()
        assert workers.pids() == []
    wait_until(lambda: children_of_ours() == children)


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[CountedWorkers]:
    """One misbehaving worker, shared by the tests of this module."""
    with pytest.MonkeyPatch.context() as patch, closing(CountedWorkers(1)) as workers:
        misbehave(patch)
        workers.start()
        patch.undo()
        yield workers
        workers.check_invariants()


def misbehave(patch: pytest.MonkeyPatch) -> None:
    """Make templates that are started from now on misbehave."""
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    patch.setattr(media_workers, "PROGRAM", "tests.frontend.misbehaving_worker")


def job_of(source: PictureSource, **options: object) -> PictureJob:
    """Return a job for the whole picture, plus its crops if the options ask for them."""
    config = ImageProcessorConfig(**{**BASE, **options})
    if config.sizes is not None:
        config = config.settled_for(read_geometry(source, FIELD))
    crops = plan_crops(read_geometry(source, FIELD), config) if config.do_pan_and_scan else ()
    return PictureJob(source, FIELD, {str(index): part for index, part in enumerate((None, *crops))}, config)


def picture(seed: int = 0, size: tuple[int, int] = (401, 311)) -> bytes:
    return encode(random_picture("RGB", size, seed), "JPEG")


def assert_equal(made: Made, expected: Made) -> None:
    assert made.pixels.keys() == expected.pixels.keys()
    for media_hash, pixels in made.pixels.items():
        assert pixels.dtype == np.uint8
        assert np.array_equal(pixels, expected.pixels[media_hash])


def assert_works(workers: MediaWorkers) -> None:
    job = job_of(picture())
    assert_equal(workers.make(job), job.run())


def error_of(make: Callable[[], object]) -> tuple[type, str, str, int, str]:
    with pytest.raises(KeepsightError) as raised:
        make()
    error = raised.value
    assert isinstance(error, UnreadablePictureError | PictureTooLargeError) or "picture" in error.code  # type: ignore[attr-defined]
    return type(error), error.field, error.message, error.status, error.code  # type: ignore[attr-defined]


def is_running(pid: int) -> bool:
    """Return whether the process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_stopped(pid: int) -> bool:
    return " T " in Path(f"/proc/{pid}/stat").read_text()


def children_of_ours() -> set[int]:
    return set(children_of(os.getpid()))


def await_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)))


# Results ------------------------------------------------------------------------------------------------------


def test_pixels_equal_those_made_without_workers(workers: MediaWorkers) -> None:
    jobs = [job_of(case.source, **case.options) for case in all_cases() if isinstance(case.source, bytes)]
    assert len(jobs) > 300
    assert any(len(job.parts) > 1 for job in jobs)
    for job in jobs:
        assert_equal(workers.make(job), job.run())


def test_only_the_parts_that_are_wanted_are_made(workers: MediaWorkers) -> None:
    job = job_of(picture(size=(200, 64)), **CROPPING)
    whole, first, *_ = job.parts
    assert len(job.parts) == 4
    for media_hashes in ([first], [first, whole]):
        wanted = PictureJob(job.source, job.field, {each: job.parts[each] for each in media_hashes}, job.config)
        made = workers.make(wanted)
        assert list(made.pixels) == media_hashes
        assert_equal(made, wanted.run())


@pytest.mark.parametrize(
    "source",
    [
        b"",
        b"no picture",
        picture()[:2000],
        encode(random_picture("RGB", (64, 64)), "PNG")[:-500],
        encode(Image.new("1", (9000, 8000)), "PNG"),
        encode(random_picture("P", (9, 9)), "GIF", save_all=True, append_images=[random_picture("P", (9, 9), 2)]),
        encode(Image.new("I;16", (9, 9)), "PNG"),
        encode(Image.new("F", (9, 9)), "TIFF"),
    ],
    ids=["empty", "no picture", "truncated jpeg", "truncated png", "too large", "animated", "16 bits", "floats"],
)
def test_refusals_equal_those_without_workers(workers: MediaWorkers, source: bytes) -> None:
    job = PictureJob(source, FIELD, {"whole": None}, ImageProcessorConfig(**BASE))
    assert error_of(lambda: workers.make(job)) == error_of(job.run)


def test_a_picture_larger_than_any_buffer_passes_and_so_do_its_pixels(workers: MediaWorkers) -> None:
    job = job_of(encode(random_picture("RGB", (1500, 1000)), "BMP"), height=896, width=896)
    assert_equal(workers.make(job), job.run())


def test_sources_other_than_files_are_made_in_process(start: Start) -> None:
    workers = start(1)
    image = random_picture("P", (61, 43))
    for source in (image, np.asarray(image.convert("RGB"))):
        job = job_of(source)
        assert_equal(workers.make(job), job.run())
    assert workers.pids() == []


@pytest.mark.parametrize(("format_", "codec"), KINDS)
def test_films_are_looked_at_and_made_as_without_them(workers: MediaWorkers, format_: str, codec: str) -> None:
    data = film(format_, codec)
    assert workers.look(FilmLook(data, FIELD)) == read_film(data, FIELD)
    moments = {"first": Moment(0, 7), "last": Moment(13, 19)}
    job = FilmJob(data, FIELD, moments, ImageProcessorConfig(height=32, width=40))
    assert_equal(workers.make(job), job.run())


def test_a_film_is_refused_in_the_same_words_and_one_in_memory_is_read_here(workers: MediaWorkers) -> None:
    for data in (b"no film", film()[:500]):
        assert error_of(lambda: workers.look(FilmLook(data, FIELD))) == error_of(lambda: read_film(data, FIELD))  # noqa: B023
    with pytest.raises(PictureTooLargeError, match="at most 99 are allowed"):
        workers.look(FilmLook(film(), FIELD, 99))
    assert workers.look(FilmLook(drawn_frames(), FIELD)) == read_film(drawn_frames(), FIELD)


def test_no_picture_waits_for_a_film(misbehaving: CountedWorkers) -> None:
    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(error_of, lambda: misbehaving.look(FilmLook(STOP, FIELD)))
        # Wait until it has stopped, or the SIGCONT would come too early.
        wait_until(lambda: any(map(is_stopped, misbehaving.pids())))
        assert_works(misbehaving)
        assert not looking.done()
        for pid in misbehaving.pids()[1:]:
            os.kill(pid, signal.SIGCONT)
        assert looking.result(SOON)[0] is UnreadablePictureError


def test_what_a_worker_says_of_a_film_is_not_believed(misbehaving: MediaWorkers) -> None:
    with pytest.raises(PictureTooLargeError, match="at most 64000000 are allowed"):
        misbehaving.look(FilmLook(IMPOSE, FIELD))


def test_sounds_are_looked_at_and_made_as_without_them(workers: MediaWorkers) -> None:
    for data in (sound("flac", "flac"), sound("mp3", "libmp3lame", rate=44_100), wav(rate=48_000)):
        geometry = workers.look(SoundLook(data, FIELD, RATE))
        assert geometry == read_sound(data, FIELD, RATE)
        job = SoundJob(data, FIELD, {"": None}, RATE, geometry.num_samples)
        assert_equal(workers.make(job), job.run())
    for broken in (b"no sound", sound("flac", "flac")[:60]):
        here = error_of(lambda: read_sound(broken, FIELD, RATE))  # noqa: B023
        assert error_of(lambda: workers.look(SoundLook(broken, FIELD, RATE))) == here  # noqa: B023


def test_the_length_of_a_wav_is_read_here_and_starts_no_process(start: Start) -> None:
    workers = start(1)
    assert workers.look(SoundLook(wav(), FIELD, RATE)).num_samples == 8_000
    assert workers.pids() == []


# Processes ----------------------------------------------------------------------------------------------------


def test_documents_are_looked_at_and_their_pages_drawn_as_without_them(workers: MediaWorkers) -> None:
    pdf = write_pdf(Page(["A report"]), Page(["of two pages"], more="/Rotate 90"))
    assert workers.look(DocumentLook(pdf, FIELD)) == read_document(pdf, FIELD)
    job = PictureJob(pdf, FIELD, {"": None}, ImageProcessorConfig(height=64, width=48), page=1)
    assert_equal(workers.make(job), job.run())
    for broken in (b"no document", pdf[:200]):
        here = error_of(lambda: read_document(broken, FIELD))  # noqa: B023
        assert error_of(lambda: workers.look(DocumentLook(broken, FIELD))) == here  # noqa: B023


def test_what_a_page_of_millions_of_letters_took_is_given_back(start: Start) -> None:
    pdf = write_pdf(Page(more="/Contents 6 0 R"), more=[stream(f"BT /F1 1 Tf ({'a' * 32}) Tj ET\n" * 150_000)])
    workers = start(1)
    workers.look(DocumentLook(write_pdf(Page()), FIELD))
    [_, worker] = workers.pids()
    before = resident_bytes(worker)
    workers.look(DocumentLook(pdf, FIELD))
    wait_until(lambda: resident_bytes(worker) <= before + media_worker.MAX_BYTES_BETWEEN_JOBS)
    assert workers.pids()[1:] == [worker]


def test_there_are_no_more_workers_than_seats_and_they_are_used_again(start: Start) -> None:
    workers = start(2)
    jobs = [job_of(picture(seed)) for seed in range(12)]
    with ThreadPoolExecutor(5) as threads:
        for job, made in zip(jobs, threads.map(workers.make, jobs), strict=True):
            assert_equal(made, job.run())
    template, *others = workers.pids()
    # Those of films and of looks are not for pictures.
    assert 1 <= len(others) <= 2
    assert_works(workers)
    assert workers.pids() == [template, *others]


def test_nothing_is_kept_from_being_looked_at_by_films_and_pictures_that_are_being_made(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    misbehave(monkeypatch)
    workers = start(1)
    config = ImageProcessorConfig()
    long = FilmJob(STOP, FIELD, {"": Moment(0, 19)}, config), PictureJob(STOP, FIELD, {"": None}, config)
    with ThreadPoolExecutor(6) as threads:
        # One more of each than has a seat of its own.
        making = [threads.submit(workers.make, job) for job in long * 2]
        try:
            wait_until(lambda: len(workers.pids()) == 1 + len(long))
            wait_until(lambda: all(map(is_stopped, workers.pids()[1:])))
            looks: list[Future[object]] = [
                threads.submit(lambda: workers.look(FilmLook(film(), FIELD)).timeline),
                threads.submit(lambda: workers.look(DocumentLook(write_pdf(Page()), FIELD))),
            ]
            assert all(look.result(SOON) for look in looks)
        finally:
            workers.close()
    for made in making:
        assert isinstance(made.exception(), RuntimeError | UnreadablePictureError)


def test_the_template_has_one_thread_or_it_could_not_be_forked(workers: MediaWorkers) -> None:
    assert_works(workers)
    workers.make(FilmJob(film(codec="libx264"), FIELD, {"": Moment(0, 19)}, ImageProcessorConfig()))
    for pid in workers.pids():
        assert "Threads:\t1\n" in Path(f"/proc/{pid}/status").read_text()


def test_once_they_are_started_the_template_has_loaded_all_that_a_picture_needs(start: Start) -> None:
    workers = start(1)
    workers.wait_until_started()
    [template] = workers.pids()
    assert "libtorch" in Path(f"/proc/{template}/maps").read_text()
    assert_works(workers)
    workers.wait_until_started()
    assert workers.pids()[0] == template


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_template_whose_frontend_ends_says_nothing_of_it(is_loaded: bool) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        program = [sys.executable, "-m", media_workers.PROGRAM, str(theirs.fileno())]
        template = subprocess.Popen(program, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    if is_loaded:
        assert ours.recv(1, socket.MSG_PEEK)
    ours.close()
    assert template.communicate(timeout=SOON)[1] == b""
    assert template.returncode == 0


def test_a_template_whose_frontend_ends_while_it_imports_does_not_import_to_the_end() -> None:
    ours, theirs = socket.socketpair()
    importing_for_ever = (
        "import sys, time; from keepsight.frontend.pixels import media_worker\n"
        "media_worker._import_everything = lambda: (print(flush=True), time.sleep(1000))\n"
        "media_worker.main()"
    )
    with theirs:
        program = [sys.executable, "-c", importing_for_ever, str(theirs.fileno())]
        template = subprocess.Popen(program, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
    assert template.stdout
    with closing(template.stdout) as output:
        assert output.readline() == b"\n"
        ours.close()
        try:
            assert template.wait(SOON) == 0
        finally:
            template.kill()


def test_nobody_waits_for_the_start_of_a_template_that_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_workers, "PROGRAM", "tests.no_such_module")
    waiting = threading.Thread(target=start(1).wait_until_started, daemon=True)
    waiting.start()
    waiting.join(SOON)
    assert not waiting.is_alive()


def test_the_processes_that_only_ask_do_without_torch() -> None:
    modules = (
        "keepsight.frontend.pixels.media_workers, keepsight.frontend.media_pool, keepsight.frontend.prepare_request"
    )
    program = f"import sys, {modules}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_interrupt_from_the_keyboard_is_for_the_frontend_alone(workers: MediaWorkers) -> None:
    assert_works(workers)
    pids = workers.pids()
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert_works(workers)
    assert workers.pids() == pids


def close_during_its_job(workers: MediaWorkers, worker: int) -> None:
    """`worker`: the only one, which can misbehave."""
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(workers.make, job_of_bytes(STOP))
        wait_until(lambda: is_stopped(worker))
        workers.close()
        with pytest.raises(RuntimeError, match="closed"):
            making.result(SOON)


def refuse(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("has_function", [True, False])
def test_a_system_or_a_python_without_pidfds_has_workers_too(
    start: Start, monkeypatch: pytest.MonkeyPatch, has_function: bool
) -> None:
    if has_function:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    else:
        monkeypatch.delattr(os, "pidfd_open")
    misbehave(monkeypatch)
    workers = start(1)
    assert_works(workers)
    [_, killed] = workers.pids()
    os.kill(killed, signal.SIGKILL)
    await_gone([killed])
    assert_works(workers)
    [_, worker] = workers.pids()
    close_during_its_job(workers, worker)
    await_gone([worker])


def test_closing_twice_is_closing_once_and_then_nothing_is_made(start: Start) -> None:
    workers = start(1)
    assert_works(workers)
    pids = workers.pids()
    for _ in range(2):
        workers.close()
        assert not any(map(is_running, pids))
    with pytest.raises(RuntimeError, match="closed"):
        workers.make(job_of(picture()))


def test_closing_while_the_first_is_being_started_ends_all(start: Start) -> None:
    workers = start(1)
    workers.start()
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(workers.make, job_of(picture()))
        wait_until(lambda: workers._free["pictures"].empty())
        workers.close()
        with pytest.raises(RuntimeError, match="closed"):
            making.result(SOON)


def test_closing_ends_running_jobs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    misbehave(monkeypatch)
    workers = start(1)
    assert_works(workers)
    [template, worker] = workers.pids()
    close_during_its_job(workers, worker)
    assert not any(map(is_running, [template, worker]))
    assert workers.num_crashes == 0


FRONTEND = """
import sys
from concurrent.futures import ThreadPoolExecutor
from keepsight.frontend.pixels.media_workers import MediaWorkers
from tests.frontend.pixels.test_media_workers import job_of, picture
workers = MediaWorkers(2)
large = [job_of(picture(seed, (1000, 1000))) for seed in range(2)]
with ThreadPoolExecutor(2) as threads:
    while len(workers.pids()) < 3:
        list(threads.map(workers.make, large))
print(*workers.pids(), flush=True)
sys.stdin.read()
"""


def test_none_outlives_a_frontend_that_is_killed() -> None:
    program = [sys.executable, "-c", FRONTEND]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as frontend:
        assert frontend.stdout
        pids = [int(pid) for pid in frontend.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(is_running, pids))
        frontend.kill()
        await_gone(pids)


# Failures -----------------------------------------------------------------------------------------------------


def job_of_bytes(source: bytes) -> PictureJob:
    return PictureJob(source, FIELD, {"whole": None}, ImageProcessorConfig(**BASE))


def test_a_picture_that_ends_two_workers_is_refused_and_the_next_is_made(
    misbehaving: CountedWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    num_crashes = misbehaving.num_crashes
    error, field, message, status, _ = error_of(lambda: misbehaving.make(job_of_bytes(CRASH)))
    assert (error, field, status) == (UnreadablePictureError, FIELD, 400)
    assert message == "the picture could not be decoded: the decoder crashed"
    assert misbehaving.num_crashes == num_crashes + 2
    assert caplog.text.count(FIELD) == 2
    assert_works(misbehaving)


def test_a_picture_that_takes_too_long_is_refused_and_not_retried(
    misbehaving: CountedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same limit as in the misbehaving workers.
    monkeypatch.setattr(media_worker, "MAX_CPU_SECONDS", 1)
    num_crashes = misbehaving.num_crashes
    with pytest.raises(PictureTooLargeError, match="takes more than 1 seconds of processor time to be decoded"):
        misbehaving.make(job_of_bytes(SPIN))
    assert misbehaving.num_crashes == num_crashes + 1
    assert_works(misbehaving)


def test_a_sound_may_not_take_as_long_as_a_picture_in_whose_seats_it_is_decoded_and_only_making_a_film_longer() -> None:
    sound = media_worker.max_cpu_seconds(SoundLook(b"", FIELD, 16_000))
    picture = media_worker.max_cpu_seconds(job_of_bytes(b""))
    assert 4 * sound <= picture == media_worker.max_cpu_seconds(FilmLook(b"", FIELD))
    assert picture < media_worker.max_cpu_seconds(FilmJob(b"", FIELD, {}, ImageProcessorConfig()))


def test_a_stuck_worker_is_given_up(misbehaving: MediaWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_works(misbehaving)
    monkeypatch.setattr(media_workers, "MAX_ATTEMPTS", 1)
    [_, worker, *_] = misbehaving.pids()
    seated = misbehaving._seats[0].worker
    assert seated
    seated._connection.settimeout(0.01)
    with pytest.raises(UnreadablePictureError):
        misbehaving.make(job_of_bytes(STOP))
    assert not is_running(worker)
    assert_works(misbehaving)


def test_a_picture_that_takes_too_much_memory_is_too_large(misbehaving: CountedWorkers) -> None:
    num_crashes = misbehaving.num_crashes
    with pytest.raises(PictureTooLargeError, match="bytes to be decoded"):
        misbehaving.make(job_of_bytes(DEVOUR))
    assert misbehaving.num_crashes == num_crashes
    assert_works(misbehaving)


@pytest.mark.parametrize("source", [BLUNDER, IMPOSE], ids=["a fault of ours", "an error that no picture has"])
def test_any_other_failure_of_a_worker_is_never_the_caller_s(misbehaving: MediaWorkers, source: bytes) -> None:
    with pytest.raises(RuntimeError, match=r"KeyError: 'of ours'|ModelNotFoundError: model: no error"):
        misbehaving.make(job_of_bytes(source))
    assert_works(misbehaving)


def test_workers_are_replaced_with_no_picture_blamed_and_outlive_their_template(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    workers = start(1)
    for _ in range(3):
        assert_works(workers)
        template, worker = workers.pids()
        os.kill(worker, signal.SIGKILL)
        await_gone([worker])
        assert_works(workers)
        assert workers.pids()[0] == template
        assert workers.pids()[1] != worker
    template, worker = workers.pids()
    os.kill(template, signal.SIGKILL)
    assert_works(workers)
    assert workers.pids()[1] == worker
    os.kill(worker, signal.SIGKILL)
    await_gone([template, worker])
    assert_works(workers)
    assert not {template, worker} & set(workers.pids())
    # The kernel ends idle ones, too, as memory runs out.
    assert workers.num_crashes == len(caplog.messages) == 5


def test_a_template_that_ended_is_counted_once_however_often_no_other_can_be_started(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    workers = start(1)
    assert_works(workers)
    for pid in workers.pids():
        os.kill(pid, signal.SIGKILL)
    await_gone(workers.pids())
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fail)
        for _ in range(3):
            with pytest.raises(MediaWorkersLostError, match="Cannot allocate memory"):
                workers.make(job_of(picture()))
    assert_works(workers)
    # The worker and its template.
    assert workers.num_crashes == len(caplog.messages) == 2


def test_no_other_thread_waits_while_the_end_of_a_template_is_logged(start: Start) -> None:
    workers, held = start(1), []

    class Look(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            held.append(workers._lock.locked())

    assert_works(workers)
    for pid in workers.pids():
        os.kill(pid, signal.SIGKILL)
    await_gone(workers.pids())
    look = Look()
    media_workers.logger.addHandler(look)
    try:
        assert_works(workers)
    finally:
        media_workers.logger.removeHandler(look)
    assert held == [False, False]


def test_they_are_replaced_though_the_folder_was_removed_that_they_were_started_in(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / "release"
    release.mkdir()
    monkeypatch.chdir(release)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Relative ones would lead elsewhere.
    workers = start(1)
    assert_works(workers)
    release.rmdir()
    for pid in workers.pids():
        os.kill(pid, signal.SIGKILL)
    assert_works(workers)


def test_when_no_worker_can_be_started_no_job_waits_for_ever(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_workers, "PROGRAM", "keepsight.frontend.no_such_worker")
    with pytest.raises(MediaWorkersLostError, match="cannot be started"):
        start(1).make(job_of(picture()))


def test_no_worker_of_another_version_of_the_program_joins_those_that_run(start: Start, tmp_path: Path) -> None:
    """As after an upgrade under a running server: its pixels might be others than those in the caches."""
    package = tmp_path / "keepsight"
    package.mkdir()
    (package / "version.py").write_text("1")
    workers = start(1, partial(check_program_is, identify_program(package), package))
    assert_works(workers)
    (package / "version.py").write_text("2")
    assert_works(workers)
    for pid in workers.pids():
        os.kill(pid, signal.SIGKILL)
    await_gone(workers.pids())
    with pytest.raises(MediaWorkersLostError, match="files were changed since the server started: restart the server"):
        workers.make(job_of(picture()))
    (package / "version.py").write_text("1")
    assert_works(workers)


def test_when_the_system_has_nothing_left_for_a_worker_it_is_worth_trying_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    workers = start(1)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", fail)
        with pytest.raises(MediaWorkersLostError, match=r"cannot be started: .*Too many open files"):
            workers.make(job_of(picture()))
    workers.make(job_of(picture()))


class Chaos:
    """Kills a process at every eighth job, once all jobs that the last kill may have hit are done."""

    def __init__(self, workers: MediaWorkers) -> None:
        self._workers, self._random, self._killing = workers, random.Random(0), threading.Lock()
        self._in_flight: set[int] = set()
        self._victims: set[int] = set()
        self.killed: list[int] = []

    def make(self, number: int, job: PictureJob) -> Made:
        if number % 8 == 7:
            self._kill_one()
        self._in_flight.add(number)
        try:
            return self._workers.make(job)
        finally:
            self._in_flight.remove(number)

    def _kill_one(self) -> None:
        with self._killing:
            wait_until(lambda: not self._victims & self._in_flight)
            template, *workers = self._workers.pids()
            # A template is killed rarely, as it takes seconds to restart.
            candidates = [template] if len(self.killed) % 10 == 9 else workers
            alive = [pid for pid in candidates if is_running(pid)]
            if alive:
                self.killed.append(self._random.choice(alive))
                os.kill(self.killed[-1], signal.SIGKILL)
                # Jobs that begin later can no longer run on it.
                await_gone(self.killed[-1:])
            self._victims = self._in_flight.copy()


def test_whichever_process_is_killed_every_job_gets_one_correct_answer(start: Start) -> None:
    workers = start(3)
    jobs = [job_of(picture(seed, (600, 500))) for seed in range(5)]
    expected = [job.run() for job in jobs]
    chaos = Chaos(workers)
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda number: chaos.make(number, jobs[number % 5]), range(100)))
    for number, answer in enumerate(answers):
        assert_equal(answer, expected[number % 5])
    assert len(chaos.killed) > 10
    assert workers.num_crashes > 0
    pids = workers.pids()
    workers.close()
    await_gone([*pids, *chaos.killed])


# Beside an event loop -----------------------------------------------------------------------------------------


class Heart:
    """Beats while its event loop runs. Measures pauses in CPU time of this process, so other load does not count."""

    def __init__(self) -> None:
        self.num_beats, self.longest_pause = 0, 0.0

    async def beat(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.005)
            now = time.process_time()
            self.num_beats, self.longest_pause, last = self.num_beats + 1, max(self.longest_pause, now - last), now


async def prepare_and_make(preparer: RequestPreparer, pool: MediaPool, data_url: str) -> CarriedPixels:
    """Prepare a request and make its pixels as the server does."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[CarriedPixels] = loop.create_future()
    messages = ask("What is it?", {"type": "image_url", "image_url": {"url": data_url}})
    prepared = await run_in_threadpool(preparer.prepare_chat, messages, SamplingParams())
    pool.make(
        prepared,
        [item.media_hash for item in prepared.engine_request.media],
        lambda _, pixels: loop.call_soon_threadsafe(answer.set_result, pixels),  # type: ignore[arg-type]
        lambda error: loop.call_soon_threadsafe(answer.set_exception, error),  # type: ignore[arg-type]
    )
    return await asyncio.wait_for(answer, 10 * SOON)


def test_the_event_loop_goes_on_while_many_large_pictures_are_made(workers: MediaWorkers) -> None:
    preparer, heart = RequestPreparer.from_config(Config()), Heart()
    # Bytes after the end of a JPEG make it a different file.
    data = picture(size=(2000, 1500))
    data_urls = [to_data_url(data + b"%d" % number, "image/jpeg") for number in range(50)]
    pool = MediaPool(2, make_pixels=workers.make)

    async def serve() -> list[CarriedPixels]:
        beating = asyncio.create_task(heart.beat())
        pixels = await asyncio.gather(*[prepare_and_make(preparer, pool, data_url) for data_url in data_urls])
        beating.cancel()
        return pixels

    with closing(pool):
        pixels = asyncio.run(serve())
        assert counted(pool, DECODED) == [50]
    for each in pixels:
        np.testing.assert_array_equal(pixels[0], each)
    assert heart.num_beats > 50
    assert heart.longest_pause < 0.5
