"""A template process that forks workers, and the workers, which decode and resize untrusted pictures and films.

    python -m keepsight.frontend.pixels.media_worker FD [PROCESSOR]

The template imports all that the work needs, and loads a borrowed model's processor, so that a worker starts in
milliseconds and shares its pages. It sends a byte once it is ready, forks a worker for each connection that it receives
through the socket FD, and reads no picture itself.
Knows no requests and no caches. Each process ends when its own socket is closed, so none outlives its frontend by more
than the picture that it is working on.
"""

import ctypes
import faulthandler
import gc
import importlib
import io
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from PIL import Image

from keepsight.borrowed import BorrowedProcessor
from keepsight.errors import CheckpointError, PictureError, PictureTooLargeError
from keepsight.frontend.pixels.make_pixels import Job, PictureJob
from keepsight.frontend.pixels.picture_wire import receive_job, send_error, send_result
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.observe.process_memory import resident_bytes

# For one picture. JPEG, PNG and WebP of 64 million pixels take at most 6 s, and 1 GiB besides what is already mapped.
MAX_CPU_SECONDS = 60
# For a sound. The ten minutes that are decoded at most take half a second, or 4 s in the shortest frames of Opus; but
# those of a FLAC could take minutes, in the seats of pictures.
MAX_SOUND_CPU_SECONDS = 15
# For a film. All frames up to the last one shown are decoded: a few hundred a second with 1080 lines.
MAX_FILM_CPU_SECONDS = 300
MAX_BYTES = 6 * 2**30
# In addition to what a worker begins with.
MAX_BYTES_BETWEEN_JOBS = 64 * 2**20
# How often a template that is still importing checks whether its frontend still waits for it.
LOOK_SECONDS = 0.05


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    faulthandler.enable()
    # Ctrl-C is for the frontend, which then closes our sockets.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel reaps workers that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with _ending_with(control):
        _import_everything()
        for encoded in sys.argv[2:]:
            _load_processor(msgspec.json.decode(encoded, type=BorrowedProcessor))
    # Otherwise the garbage collector would write to the pages that the workers share.
    gc.collect()
    gc.freeze()
    with suppress(ConnectionError):  # the frontend has ended
        control.send(b"\0")
        while (connection := _receive_connection(control)) is not None:
            _fork_worker(control, connection)
            connection.close()


@contextmanager
def _ending_with(control: socket.socket) -> Iterator[None]:
    """End this process if the frontend ends during imports, which take a second, or several on a busy machine.

    A thread watches for that. It ends with the context, as a process with several threads could not be forked.
    """
    is_over = threading.Event()
    watch = threading.Thread(target=_end_with, args=(control, is_over))
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join()


def _end_with(control: socket.socket, is_over: threading.Event) -> None:
    poll = select.poll()
    poll.register(control, 0)  # only for a hang-up
    while not is_over.wait(LOOK_SECONDS):
        if poll.poll(0):
            os._exit(0)


def _import_everything() -> None:
    """Import all that jobs need. Some of it is loaded only by a first picture. The libraries for films and PDFs may be
    missing: then those are refused.
    """
    for name in ("av", "pypdfium2"):
        with suppress(ImportError):
            importlib.import_module(name)
    config = ImageProcessorConfig(height=4, width=4)
    for format_ in ("JPEG", "PNG"):
        encoded = io.BytesIO()
        Image.new("RGB", (8, 8)).save(encoded, format_)
        PictureJob(encoded.getvalue(), "picture", {"": None}, config).run()


def _load_processor(processor: BorrowedProcessor) -> None:
    with suppress(CheckpointError, ImportError):  # a job that needs it will report it
        from keepsight.frontend.pixels.borrowed_pictures import load_pictures

        load_pictures(processor)


def _receive_connection(control: socket.socket) -> socket.socket | None:
    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if message else None


def _fork_worker(control: socket.socket, connection: socket.socket) -> None:
    if os.fork() != 0:
        return
    try:
        control.close()
        work(connection)
    except ConnectionError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        # Whatever happens, the worker must not return into the template's loop.
        os._exit(0)


def max_cpu_seconds(job: Job) -> int:
    if job.work == "films":
        return MAX_FILM_CPU_SECONDS
    return MAX_SOUND_CPU_SECONDS if job.what == "sound" else MAX_CPU_SECONDS


def work(connection: socket.socket) -> None:
    """Run jobs until the other end is closed. Sends its pid first, so that the frontend knows that it is there."""
    _limit_memory()
    connection.sendall(os.getpid().to_bytes(4))
    max_resident = resident_bytes(os.getpid()) + MAX_BYTES_BETWEEN_JOBS
    while True:
        job = receive_job(connection)
        _limit_time(max_cpu_seconds(job))
        _answer(connection, job)
        del job
        if resident_bytes(os.getpid()) > max_resident:
            _give_back_memory()


def _answer(connection: socket.socket, job: Job) -> None:
    try:
        result = job.run()
    except MemoryError:
        send_error(connection, PictureTooLargeError(job.field, f"takes more than {MAX_BYTES} bytes to be decoded"))
    except Exception as error:
        if not isinstance(error, PictureError | CheckpointError):
            traceback.print_exc()
        send_error(connection, error)
    else:
        send_result(connection, result)


def _limit_memory() -> None:
    """Limit the address space, except what is mapped already; disable core dumps, which would hold a user's picture."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _lower_limit(resource.RLIMIT_AS, mapped + MAX_BYTES)
    _lower_limit(resource.RLIMIT_CORE, 0)


def _give_back_memory() -> None:
    """Return memory to the system. PDFium frees small pieces, which glibc keeps: gigabytes for a page of millions of
    letters.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _limit_time(max_seconds: int) -> None:
    """Let the kernel end a decoder that never ends: no signal handler of Python's would run."""
    _lower_limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + max_seconds)


def _lower_limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
