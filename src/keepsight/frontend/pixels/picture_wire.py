"""Sends media jobs and their answers over a stream socket: a length, a msgpack header, raw bytes.

Knows neither decoders nor processes. A worker has read untrusted files, so its answer is not trusted either: the number
of pixels is the one that follows from the job's options, what a look found is checked to be possible, and its error is
one of those that a picture can have. When the other end is gone, or what it sent is no message, everything here raises
a ConnectionError.
"""

import socket
from typing import Any, TypeVar

import msgspec
import numpy as np

from keepsight.errors import (
    CheckpointConfigError,
    CheckpointError,
    PictureError,
    PictureTooLargeError,
    UnknownArchitectureError,
    UnreadablePictureError,
    UnsupportedPictureError,
)
from keepsight.frontend.pixels.make_pixels import BorrowedLook, Found, Job, Look, Made
from keepsight.ipc.codec import UNREADABLE
from keepsight.requests import Pixels

# The moments in a prompt of 262,144 tokens, at a dozen tokens each, named by the longest digests, take 4/5 of it.
MAX_HEADER_BYTES = 4 * 2**20
MAX_MESSAGE_CHARACTERS = 2000
Read = TypeVar("Read")
_ERRORS = {
    error.__name__: error
    for error in (PictureError, UnreadablePictureError, UnsupportedPictureError, PictureTooLargeError)
}
# Errors of the checkpoint, when its own processor is used.
_CHECKPOINT_ERRORS = {error.__name__: error for error in (CheckpointConfigError, UnknownArchitectureError)}


class _JobHeader(msgspec.Struct, frozen=True):
    # Without its source, whose bytes follow.
    job: Job
    num_bytes: int


class _AnswerHeader(msgspec.Struct, frozen=True):
    """If there is no error, the pixels of all parts follow in order; none follow the answer to a look."""

    error: str | None = None
    message: str = ""
    # Of decoding and of resizing, as measured by the worker.
    seconds: tuple[float, float] = (0.0, 0.0)
    # The encoded result of a look: decoded as its type, as objects of no type may take eighty times the bytes.
    found: msgspec.Raw = msgspec.Raw(b"\xc0")


def send_job(connection: socket.socket, job: Job) -> None:
    """Send a job, with a generic name in place of the caller's, which is needed only on this side."""
    assert isinstance(job.source, bytes)
    bare = msgspec.structs.replace(job, source=b"", field=job.what)
    _send_header(connection, _JobHeader(bare, len(job.source)))
    connection.sendall(job.source)


def receive_job(connection: socket.socket) -> Job:
    header = _decode(_receive_header(connection), _JobHeader)
    source = bytes(_receive_exactly(connection, header.num_bytes))
    return msgspec.structs.replace(header.job, source=source)


def send_result(connection: socket.socket, result: Made | Found) -> None:
    if not isinstance(result, Made):
        _send_header(connection, _AnswerHeader(found=msgspec.Raw(msgspec.msgpack.encode(result))))
        return
    _send_header(connection, _AnswerHeader(seconds=result.seconds))
    for pixels in result.pixels.values():
        connection.sendall(np.ascontiguousarray(pixels).data)


def send_error(connection: socket.socket, error: Exception) -> None:
    message = error.message if isinstance(error, PictureError | CheckpointError) else str(error)
    _send_header(connection, _AnswerHeader(type(error).__name__, message[:MAX_MESSAGE_CHARACTERS]))


def receive_answer(connection: socket.socket, job: Job) -> Made | Found | Exception:
    """Return the answer, or the error that is the answer.

    A ConnectionError is raised, not returned: no answer came, and none will.
    """
    header = _decode(_receive_header(connection), _AnswerHeader)
    if header.error in _ERRORS:
        return _ERRORS[header.error](job.field, header.message)
    if header.error in _CHECKPOINT_ERRORS and isinstance(job, BorrowedLook):
        return _CHECKPOINT_ERRORS[header.error](job.processor.directory, header.message)
    if header.error is not None:
        return RuntimeError(f"a media worker failed: {header.error}: {header.message}")
    if isinstance(job, Look):
        found: Found = _decode(header.found, job.finds)
        return _find_fault(job, found) or found
    pixels = {media_hash: _receive_pixels(connection, job.shape) for media_hash in job.parts}
    faults = (_find_fault(job, each) for each in pixels.values())
    return next(filter(None, faults), Made(pixels, header.seconds))


def _find_fault(job: Job, made: Any) -> PictureError | None:
    """Return the error by which the job's caller is refused what was found or made, if any."""
    try:
        job.check(made)
    except PictureError as error:
        return error
    except Exception as error:  # also of the code that parses arrays
        raise ConnectionError(f"what came is none of the {job.what}: {error}") from error
    return None


def _receive_pixels(connection: socket.socket, shape: tuple[int, int, int]) -> Pixels:
    pixels = np.empty(shape, np.uint8)
    _receive_into(connection, pixels.data.cast("B"))
    return pixels


def _send_header(connection: socket.socket, header: _JobHeader | _AnswerHeader) -> None:
    encoded = msgspec.msgpack.encode(header)
    assert len(encoded) <= MAX_HEADER_BYTES
    connection.sendall(len(encoded).to_bytes(4) + encoded)


def _decode(encoded: bytearray | msgspec.Raw, kind: type[Read]) -> Read:
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except UNREADABLE as error:
        raise ConnectionError(f"what came cannot be read: {error}") from error


def _receive_header(connection: socket.socket) -> bytearray:
    num_bytes = int.from_bytes(_receive_exactly(connection, 4))
    if num_bytes > MAX_HEADER_BYTES:
        raise ConnectionError(f"a header of {num_bytes} bytes")
    return _receive_exactly(connection, num_bytes)


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    received = bytearray(num_bytes)
    _receive_into(connection, memoryview(received))
    return received


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        num_bytes = connection.recv_into(buffer)
        if not num_bytes:
            raise ConnectionResetError("the other end is gone")
        buffer = buffer[num_bytes:]
