"""The template process of media workers that fail on demand as a broken decoder might.

Bytes that are one of the words below trigger a failure; all other pictures are made as usual.
"""

import ctypes
import os
import signal
from collections.abc import Callable

from keepsight.errors import ModelNotFoundError
from keepsight.frontend.pixels import media_worker
from keepsight.frontend.pixels.make_pixels import FilmJob, FilmLook, Job, Made, PictureJob
from keepsight.frontend.pixels.picture_wire import receive_job
from keepsight.media import Geometry, Timeline

CRASH, SPIN, STOP, DEVOUR, BLUNDER, IMPOSE = b"CRASH", b"SPIN", b"STOP", b"DEVOUR", b"BLUNDER", b"IMPOSE"
IMPOSED = Geometry(2**40, 2**40, Timeline(1, 1.0))


class _MisbehavingJob(PictureJob, frozen=True):
    def run(self) -> Made:
        if self.source == CRASH:
            ctypes.string_at(0)
        while self.source == SPIN:
            pass
        if self.source == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.source == DEVOUR:
            bytearray(2 * media_worker.MAX_BYTES)
        if self.source == BLUNDER:
            raise KeyError("of ours")
        if self.source == IMPOSE:
            raise ModelNotFoundError("model", "no error of a picture")
        return super().run()


class _MisbehavingFilm(FilmJob, frozen=True):
    def run(self, is_given_up: Callable[[], bool] = lambda: False) -> Made:
        if self.source == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().run(is_given_up)


class _MisbehavingLook(FilmLook, frozen=True):
    def run(self) -> Geometry:
        if self.source == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        return IMPOSED if self.source == IMPOSE else super().run()


def _as_misbehaving(job: Job) -> Job:
    if isinstance(job, FilmLook):
        return _MisbehavingLook(job.source, job.field)
    if isinstance(job, FilmJob):
        return _MisbehavingFilm(job.source, job.field, job.parts, job.config)
    if isinstance(job, PictureJob):
        return _MisbehavingJob(job.source, job.field, job.parts, job.config)
    return job


if __name__ == "__main__":
    media_worker.receive_job = lambda connection: _as_misbehaving(receive_job(connection))  # type: ignore[attr-defined]
    media_worker.MAX_CPU_SECONDS = 1
    media_worker.main()
