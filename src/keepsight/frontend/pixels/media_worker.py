"""A process that forks others, and what those do: decode and resize pictures and films that strangers sent.

    python -m keepsight.frontend.pixels.media_worker FD [PROCESSOR]

This first one, the template, has imported all that the work needs, and loaded a borrowed model's processor, so the next
worker is there in milliseconds and shares its pages.  It says so by a byte, forks one for each connection that comes
through the socket FD, and reads no picture itself.
Knows no requests and no caches.  Each process ends when its own socket does, so none outlives whom it works for by more
than the picture that it is at.
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

# For one picture. Of 64 million pixels, JPEG, PNG and WebP take at most 6 s, and 1 GiB beside what is mapped already.
MAX_CPU_SECONDS = 60
# For a sound.  The ten minutes that are decoded at most take half a second, 4 in the shortest pieces that Opus has; but
# of a FLAC they could take minutes, in the seats of pictures.
MAX_SOUND_CPU_SECONDS = 15
# For a film, as all frames before the last that is shown are decoded: a few hundred a second of 1080 lines.
MAX_FILM_CPU_SECONDS = 300
MAX_BYTES = 6 * 2**30
# Beside what a worker begins with.
MAX_BYTES_BETWEEN_JOBS = 64 * 2**20
# How often a template that is still importing looks whether anybody waits for it.
LOOK_SECONDS = 0.05


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    faulthandler.enable()
    # Ctrl-C is for the frontend, which then closes our sockets.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel clears away those that ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with _ending_with(control):
        _import_everything()
        for encoded in sys.argv[2:]:
            _load_processor(msgspec.json.decode(encoded, type=BorrowedProcessor))
    # The collector would touch the pages that the workers share.
    gc.collect()
    gc.freeze()
    with suppress(ConnectionError):  # whoever started it has ended
        control.send(b"\0")
        while (connection := _receive_connection(control)) is not None:
            _fork_worker(control, connection)
            connection.close()


@contextmanager
def _ending_with(control: socket.socket) -> Iterator[None]:
    """Importing takes a second, or some on a busy machine: whoever was left alone meanwhile does not import the rest.

    By a thread that has ended, too, when this does: a process with several could not be forked.
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
    poll.register(control, 0)  # for its end alone
    while not is_over.wait(LOOK_SECONDS):
        if poll.poll(0):
            os._exit(0)


def _import_everything() -> None:
    """Some of it is loaded only when the first picture comes.  What opens films or PDFs may be missing: then those are
    refused.
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
    with suppress(CheckpointError, ImportError):  # whoever asks for it will be told
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
        # Whatever happens, it must not return into the template's loop.
        os._exit(0)


def max_cpu_seconds(job: Job) -> int:
    if job.is_film:
        return MAX_FILM_CPU_SECONDS
    return MAX_SOUND_CPU_SECONDS if job.what == "sound" else MAX_CPU_SECONDS


def work(connection: socket.socket) -> None:
    """Until the other end is closed.  Says first who it is, so that whoever waits knows that it is there."""
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
    """Address space, what is mapped already not counted; and no dumps, which would hold a stranger's picture."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _lower_limit(resource.RLIMIT_AS, mapped + MAX_BYTES)
    _lower_limit(resource.RLIMIT_CORE, 0)


def _give_back_memory() -> None:
    """What PDFium frees lies in small pieces, which glibc keeps: of a page with millions of letters, gigabytes."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _limit_time(max_seconds: int) -> None:
    """A decoder that never ends is ended by the kernel: no handler of Python's would run."""
    _lower_limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + max_seconds)


def _lower_limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
