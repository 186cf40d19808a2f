"""The template process of media workers that do, on demand, what a broken decoder might.

A picture whose bytes are one of these words is none; all others are made as ever.
"""

import ctypes
import os
import signal

from keepsight.errors import ModelNotFoundError
from keepsight.frontend.pixels import media_worker
from keepsight.frontend.pixels.make_pixels import Made, PictureJob
from keepsight.frontend.pixels.picture_wire import receive_job

CRASH, SPIN, STOP, DEVOUR, BLUNDER, IMPOSE = b"CRASH", b"SPIN", b"STOP", b"DEVOUR", b"BLUNDER", b"IMPOSE"


class _MisbehavingJob(PictureJob):
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


def _as_misbehaving(job: PictureJob) -> PictureJob:
    return _MisbehavingJob(job.source, job.field, job.parts, job.config)


if __name__ == "__main__":
    media_worker.receive_job = lambda connection: _as_misbehaving(receive_job(connection))  # type: ignore[attr-defined]
    media_worker.MAX_CPU_SECONDS = 1
    media_worker.main()
