"""Media are decoded in processes of their own, so that a decoder that crashes costs one, not the server.

Each caller borrows a worker for a picture; the template process (`media_worker`) forks a new one when there is none.
Films have seats of their own, as they may take minutes: the system shares the cores between them and pictures.
Knows no cache and no waiters: that is `MediaPool`, whose threads call `make`.  Invariant: a seat
holds a worker or none, and one that is free holds none that is at work.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from typing import Any

import msgspec

from keepsight.borrowed import BorrowedProcessor
from keepsight.errors import MediaWorkersLostError, PictureTooLargeError, UnreadablePictureError
from keepsight.frontend.intake.open_film import FilmSource
from keepsight.frontend.intake.read_document import Document
from keepsight.frontend.intake.read_sound import is_length_known
from keepsight.frontend.intake.sound_samples import SoundSource
from keepsight.frontend.pixels.make_pixels import (
    BorrowedLook,
    DocumentLook,
    FilmLook,
    Found,
    Job,
    Made,
    MakingJob,
    SoundLook,
)
from keepsight.frontend.pixels.media_worker import max_cpu_seconds
from keepsight.frontend.pixels.picture_wire import receive_answer, send_job
from keepsight.ipc.start_folder import start_folder
from keepsight.media import DEFAULT_MAX_PIXELS, Geometry, PictureLayout

logger = logging.getLogger(__name__)

PROGRAM = "keepsight.frontend.pixels.media_worker"

# A worker that ended may have been killed for another's sake; two that ended at one picture were not.
MAX_ATTEMPTS = 2
MAX_STARTS = 3
# For what does not even use the processor; a worker's own limits are much closer.
MAX_WAIT_SECONDS = 900
# A numeric library that starts threads when it is imported could not be forked.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Of transformers: no threads of its tokenizers either, nothing from the network, nothing said that is no error.
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


class MediaWorkers:
    """May be used from several threads.  Close it before the pool whose threads may be waiting here."""

    def __init__(self, num_workers: int, on_crash: Callable[[], object] = lambda: None) -> None:
        """So many for pictures and sounds, and as many for films."""
        self._for_pictures, self._for_films = _free_seats(num_workers), _free_seats(num_workers)
        self._seats = [*self._for_pictures.queue, *self._for_films.queue]
        self._lock = threading.Lock()
        self._template: _Template | None = None
        # What a template loads before it forks.
        self._processor: BorrowedProcessor | None = None
        self._is_closed = False
        self._on_crash = on_crash

    def start(self) -> None:
        """Returns at once; whoever comes first waits for the rest."""
        with self._lock:
            self._live_template()

    def wait_until_started(self) -> None:
        """Or ended: the next picture will tell."""
        with self._lock:
            template = self._live_template()
        template.wait_until_loaded()

    def make(self, job: MakingJob) -> Made:
        """As `job.run()`; a picture that ends two workers is refused, too."""
        if not isinstance(job.source, bytes):
            return job.run()  # an object of this process, decoded already
        made: Made = self._ask(job)
        return made

    def read_film(self, source: FilmSource, field: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> Geometry:
        """As the function of that name; what ends two workers is refused, too."""
        look = FilmLook(source, field, max_pixels)
        geometry: Geometry = self._ask(look) if isinstance(source, bytes) else look.run()
        return geometry

    def read_sound(self, source: SoundSource, field: str, sampling_rate: int) -> Geometry:
        """The same, of a sound."""
        look = SoundLook(source, field, sampling_rate)
        geometry: Geometry = look.run() if is_length_known(source) else self._ask(look)
        return geometry

    def read_document(self, source: bytes, field: str) -> Document:
        """The same, of a PDF."""
        document: Document = self._ask(DocumentLook(source, field))
        return document

    def lay_out_borrowed(self, processor: BorrowedProcessor, geometry: Geometry, field: str) -> PictureLayout:
        """How the processor writes a picture of this size; raises CheckpointConfigError if it cannot be used."""
        self._processor = processor
        layout: PictureLayout = self._ask(BorrowedLook(processor, geometry, field))
        return layout

    def close(self) -> None:
        """Ends every process, whatever it is at; returns when nobody is in `make` any more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for seat in self._seats:
                if seat.worker is not None:
                    seat.worker.kill()
            # Last, as it clears away its workers.
            if self._template is not None:
                self._template.end()
                self._template = None
        for free in (self._for_pictures, self._for_films):
            for seat in [free.get() for _ in range(len(self._seats) // 2)]:
                self._clear(seat)
                free.put(seat)

    def pids(self) -> list[int]:
        """Of all processes that are known to run, the template first."""
        with self._lock:
            workers = [seat.worker for seat in self._seats if seat.worker is not None]
            return [process.pid for process in (self._template, *workers) if process is not None]

    def check_invariants(self) -> None:
        """While nobody is in `make`."""
        free = [*self._for_pictures.queue, *self._for_films.queue]
        assert sorted(map(id, free)) == sorted(map(id, self._seats))
        assert not (self._is_closed and self.pids())

    def _ask(self, job: Job) -> Any:
        """What its `run` gives."""
        free = self._for_films if job.is_film else self._for_pictures
        seat = free.get()
        try:
            answer = self._ask_in(seat, job)
        finally:
            free.put(seat)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask_in(self, seat: "_Seat", job: Job) -> Made | Found | Exception:
        max_seconds = max_cpu_seconds(job)
        for _ in range(MAX_ATTEMPTS):
            worker, began = self._worker_in(seat), time.monotonic()
            answer = worker.try_ask(job)
            if answer is not None:
                return answer
            self._note_crash(job)
            if time.monotonic() - began >= max_seconds:  # by the kernel: another would end as late
                message = f"takes more than {max_seconds} seconds of a processor to be decoded"
                return PictureTooLargeError(job.field, message)
        return UnreadablePictureError(job.field, f"the {job.what} could not be decoded: the decoder crashed")

    def _note_crash(self, job: Job) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._on_crash()
        logger.warning("%s: a media worker ended while it was at this", job.field)

    def _worker_in(self, seat: "_Seat") -> "_Worker":
        if seat.worker is None or seat.worker.has_ended():
            self._clear(seat)
            worker = self._fork_worker()
            with self._lock:
                seat.worker = worker
                if self._is_closed:
                    worker.kill()
        assert seat.worker is not None
        return seat.worker

    def _clear(self, seat: "_Seat") -> None:
        with self._lock:
            if seat.worker is not None:
                seat.worker.end()
                seat.worker = None

    def _fork_worker(self) -> "_Worker":
        for _ in range(MAX_STARTS):
            try:
                with self._lock:
                    template = self._live_template()
                    connection = template.fork_worker()
            except OSError as error:  # no descriptors are left, or no memory
                raise MediaWorkersLostError(f"media workers cannot be started: {error}") from error
            worker = _Worker.try_meet(connection)
            if worker is not None:
                return worker
            logger.warning("no media worker came: its template has ended, or will be")
            with self._lock:
                template.end()
        raise MediaWorkersLostError("media workers cannot be started")

    def _live_template(self) -> "_Template":
        if self._is_closed:
            raise RuntimeError("the media workers are closed")
        if self._template is None or self._template.has_ended():
            if self._template is not None:
                self._template.end()
            self._template = _Template(self._processor)
        return self._template


@dataclass(eq=False, slots=True)
class _Seat:
    worker: "_Worker | None" = None


def _free_seats(number: int) -> LifoQueue[_Seat]:
    """The last that was given back goes first: its worker's memory is warm."""
    seats: LifoQueue[_Seat] = LifoQueue()
    for _ in range(number):
        seats.put(_Seat())
    return seats


class _Template:
    def __init__(self, processor: BorrowedProcessor | None) -> None:
        environment = {**dict.fromkeys(THREAD_VARIABLES, "1"), **os.environ, **QUIET}
        loaded = () if processor is None else (msgspec.json.encode(processor).decode(),)
        self._control, theirs = socket.socketpair()
        with theirs:
            # -P: nothing is imported from the folder that one happens to be in.
            program = [sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno()), *loaded]
            self._process = subprocess.Popen(
                program,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                cwd=start_folder(Path("/")),  # it reads no file that somebody names
            )
        self.pid = self._process.pid

    def wait_until_loaded(self) -> None:
        _is_readable(self._control.fileno(), MAX_WAIT_SECONDS)

    def fork_worker(self) -> socket.socket:
        """Our end of its connection; if the template is gone, the other end is, too."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except OSError:
                logger.debug("the template cannot be reached", exc_info=True)
        return ours

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Its workers work on until their own connections end."""
        self._process.kill()
        self._process.wait()
        self._control.close()


class _Worker:
    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self.pid = connection, pid
        # It can be killed by this even when its number has become another's.
        self._process = os.pidfd_open(pid)

    @classmethod
    def try_meet(cls, connection: socket.socket) -> "_Worker | None":
        """Waits until it says who it is; None if it, or the template before it, ended."""
        connection.settimeout(MAX_WAIT_SECONDS)
        try:
            pid = connection.recv(4, socket.MSG_WAITALL)
            if len(pid) == 4:
                return cls(connection, int.from_bytes(pid))
        except OSError:
            logger.debug("no worker came", exc_info=True)
        connection.close()
        return None

    def try_ask(self, job: Job) -> Made | Found | Exception | None:
        """What it answers; None if it ended instead, or did what it must not."""
        try:
            send_job(self._connection, job)
            return receive_answer(self._connection, job)
        except (OSError, msgspec.MsgspecError):
            self.kill()
            return None

    def has_ended(self) -> bool:
        """Between jobs it says nothing: what can be read is the end."""
        return _is_readable(self._connection.fileno())

    def kill(self) -> None:
        """Returns when it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        _is_readable(self._process, MAX_WAIT_SECONDS)

    def end(self) -> None:
        self.kill()
        self._connection.close()
        os.close(self._process)


def _is_readable(descriptor: int, max_wait_seconds: float = 0) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max_wait_seconds * 1000))
