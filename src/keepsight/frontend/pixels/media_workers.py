"""Decodes media in subprocesses, so that a decoder that crashes takes down only its own process, not the server.

Each caller borrows a worker for a picture; the template process (`media_worker`) forks a new one when there is none.
Films have seats of their own, as they may take minutes, and so have looks, without which no request with new media can
be prepared: the system shares the cores between them and pictures.
Knows no cache and no waiters: those are in `MediaPool`, whose threads call `make`. Invariant: a seat holds one worker
or none, and the worker of a free seat is idle.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from typing import Any, get_args

import msgspec

from keepsight.borrowed import BorrowedProcessor
from keepsight.errors import MediaWorkersLostError, PictureTooLargeError, ServerStartError, UnreadablePictureError
from keepsight.frontend.intake.read_sound import is_length_known
from keepsight.frontend.pixels.make_pixels import BorrowedLook, Found, Job, Look, Made, MakingJob, SoundLook, Work
from keepsight.frontend.pixels.media_worker import max_cpu_seconds
from keepsight.frontend.pixels.picture_wire import receive_answer, send_job
from keepsight.ipc.start_folder import start_folder
from keepsight.program_identity import PYTHON

logger = logging.getLogger(__name__)

PROGRAM = "keepsight.frontend.pixels.media_worker"

# One worker that ended may have been killed for an unrelated reason; two that ended at the same picture were not.
MAX_ATTEMPTS = 2
MAX_STARTS = 3
# For a worker that hangs without using the CPU; its own CPU limits are much lower.
MAX_WAIT_SECONDS = 900
# Set to one thread: a process in which a numeric library starts threads on import could not be forked.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# For transformers: no threads of its tokenizers either, no network access, and only errors logged.
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


class MediaWorkers:
    """The worker processes. May be used from several threads; close it before the pool whose threads may wait here."""

    def __init__(
        self,
        num_workers: int,
        on_crash: Callable[[], object] = lambda: None,
        check_program: Callable[[], object] = lambda: None,
    ) -> None:
        """`num_workers`: how many there are for each kind of work.

        `check_program` raises ServerStartError if a process started now would be of another version of the program.
        """
        self._free: dict[Work, LifoQueue[_Seat]] = {work: _free_seats(num_workers) for work in get_args(Work)}
        self._seats = [seat for free in self._free.values() for seat in free.queue]
        self._lock = threading.Lock()
        self._template: _Template | None = None
        # The processor that a template loads before it forks.
        self._processor: BorrowedProcessor | None = None
        self._is_closed = False
        self._on_crash, self._check_program = on_crash, check_program

    def start(self) -> None:
        """Start the template and return at once; the first job waits until it has loaded."""
        with self._lock:
            self._live_template()

    def wait_until_started(self) -> None:
        """Wait until the template has loaded, or has ended, which the next job will find out."""
        with self._lock:
            template = self._live_template()
        template.wait_until_loaded()

    def make(self, job: MakingJob) -> Made:
        """Do what `job.run()` does; a picture at which two workers end is refused, too."""
        made: Made = self._ask(job)
        return made

    def look(self, look: Look) -> Any:
        """Do what `look.run()` does; what two workers end at is refused, too."""
        if isinstance(look, BorrowedLook):
            self._processor = look.processor
        return self._ask(look)

    def close(self) -> None:
        """End every process, even one at work; return when no thread is in `make` any more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for seat in self._seats:
                if seat.worker is not None:
                    seat.worker.kill()
            # Last, as it reaps its workers.
            if self._template is not None:
                self._template.end()
                self._template = None
        for free in self._free.values():
            for seat in [free.get() for _ in range(len(self._seats) // len(self._free))]:
                self._clear(seat)
                free.put(seat)

    def pids(self) -> list[int]:
        """Return the pids of all processes that are known to run, the template's first."""
        with self._lock:
            workers = [seat.worker for seat in self._seats if seat.worker is not None]
            return [process.pid for process in (self._template, *workers) if process is not None]

    def check_invariants(self) -> None:
        """Check invariants, which hold while no thread is in `make`."""
        free = [seat for free in self._free.values() for seat in free.queue]
        assert sorted(map(id, free)) == sorted(map(id, self._seats))
        assert not (self._is_closed and self.pids())

    def _ask(self, job: Job) -> Any:
        """Return what the job's `run` returns, from a worker unless no decoder is needed."""
        if _is_done_here(job):
            return job.run()
        free = self._free[job.work]
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
            self._note_crash(f"{job.field}: a media worker died while processing this")
            self._clear(seat)
            if time.monotonic() - began >= max_seconds:  # ended by the kernel: another would take as long
                message = f"takes more than {max_seconds} seconds of processor time to be decoded"
                return PictureTooLargeError(job.field, message)
        return UnreadablePictureError(job.field, f"the {job.what} could not be decoded: the decoder crashed")

    def _note_crash(self, message: str) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._on_crash()
        logger.warning("%s", message)

    def _worker_in(self, seat: "_Seat") -> "_Worker":
        if seat.worker is not None and seat.worker.has_ended():
            self._note_crash("a media worker died while it was idle: it is replaced")
            self._clear(seat)
        if seat.worker is None:
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
            except OSError as error:  # out of file descriptors, or of memory
                raise MediaWorkersLostError(f"media workers cannot be started: {error}") from error
            worker = _Worker.try_meet(connection)
            if worker is not None:
                return worker
            self._discard(template)
        raise MediaWorkersLostError("media workers cannot be started")

    def _live_template(self) -> "_Template":
        if self._is_closed:
            raise RuntimeError("the media workers are closed")
        if self._template is None:
            try:
                self._check_program()
            except ServerStartError as error:
                raise MediaWorkersLostError(f"media workers cannot be started: {error}") from error
            self._template = _Template(self._processor)
        return self._template

    def _discard(self, template: "_Template") -> None:
        """Forget a template that has ended, or whose worker has, unless another thread did."""
        with self._lock:
            if self._template is not template:
                return
            self._template = None
            template.end()
            self._on_crash()
        logger.warning("the process that starts media workers no longer starts any: it is replaced")


def _is_done_here(job: Job) -> bool:
    """Return whether a job is about an object of this process, decoded already, or a sound whose header says enough."""
    return is_length_known(job.source) if isinstance(job, SoundLook) else not isinstance(job.source, bytes)


@dataclass(eq=False, slots=True)
class _Seat:
    worker: "_Worker | None" = None


def _free_seats(number: int) -> LifoQueue[_Seat]:
    """Return a queue of seats. The one returned last is taken first: its worker's memory is warm."""
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
            program = [*PYTHON, "-m", PROGRAM, str(theirs.fileno()), *loaded]
            self._process = subprocess.Popen(
                program,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                cwd=start_folder(Path("/")),  # it opens no path that a user gives
            )
        self.pid = self._process.pid

    def wait_until_loaded(self) -> None:
        _is_readable(self._control.fileno(), MAX_WAIT_SECONDS)

    def fork_worker(self) -> socket.socket:
        """Return our end of a new worker's connection; if the template is gone, the other end is, too."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except OSError:
                logger.debug("the template cannot be reached", exc_info=True)
        return ours

    def end(self) -> None:
        """End the template; its workers continue until their own connections are closed."""
        self._process.kill()
        self._process.wait()
        self._control.close()


class _Worker:
    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self.pid, self._process = connection, pid, _try_open_process(pid)

    @classmethod
    def try_meet(cls, connection: socket.socket) -> "_Worker | None":
        """Wait until the worker sends its pid; None if it, or the template before it, has ended."""
        connection.settimeout(MAX_WAIT_SECONDS)
        try:
            pid = connection.recv(4, socket.MSG_WAITALL)
            if len(pid) == 4:
                return cls(connection, int.from_bytes(pid))
        except OSError:
            logger.debug("no media worker started", exc_info=True)
        connection.close()
        return None

    def try_ask(self, job: Job) -> Made | Found | Exception | None:
        """Return the worker's answer; None if it ended instead, or violated the protocol."""
        try:
            send_job(self._connection, job)
            return receive_answer(self._connection, job)
        except OSError:
            self.kill()
            return None

    def has_ended(self) -> bool:
        """Return whether the worker has ended: it sends nothing between jobs, so only its end can be read."""
        return _is_readable(self._connection.fileno())

    def kill(self) -> None:
        """Kill the worker, and return when it has ended."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            _is_readable(self._process, MAX_WAIT_SECONDS)
        elif not _has_hung_up(self._connection):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _has_hung_up(self._connection, MAX_WAIT_SECONDS)

    def end(self) -> None:
        self.kill()
        self._connection.close()
        if self._process is not None:
            os.close(self._process)


def _try_open_process(pid: int) -> int | None:
    """Return a pidfd, with which no other process can be killed, even if the pid is reused.

    None if the kernel is too old, a filter of system calls refuses it, or Python was built without it.
    """
    with suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None


def _has_hung_up(connection: socket.socket, max_wait_seconds: float = 0) -> bool:
    """Return whether the other end was closed, as by its process's end, whatever is left to read."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(max_wait_seconds * 1000))


def _is_readable(descriptor: int, max_wait_seconds: float = 0) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max_wait_seconds * 1000))
