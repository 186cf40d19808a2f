"""A picture's job and its answer over a stream socket: a length, a msgpack header of that length, and raw bytes.

Knows neither decoders nor processes.  A worker has read what strangers sent, so its answer is not believed: its pixels
are exactly as many as the job's options say, and its error is one of those that a picture can have.  When the other end
is gone, everything here raises a ConnectionError.
"""

import socket
from dataclasses import dataclass

import msgspec
import numpy as np

from keepsight.errors import PictureError, PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.pixels.make_pixels import Made, PictureJob
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import CropBox
from keepsight.requests import Pixels

# The crops that fit a prompt of 131,072 tokens, named by the longest digests, take a third of it.
MAX_HEADER_BYTES = 256 * 1024
MAX_MESSAGE_CHARACTERS = 2000
_ERRORS = {
    error.__name__: error
    for error in (PictureError, UnreadablePictureError, UnsupportedPictureError, PictureTooLargeError)
}


@dataclass(frozen=True, slots=True)
class _JobHeader:
    num_bytes: int
    parts: dict[str, CropBox | None]
    config: ImageProcessorConfig
    max_pixels: int


@dataclass(frozen=True, slots=True)
class _AnswerHeader:
    """Without an error, the pixels of all parts follow, in their order."""

    error: str | None = None
    message: str = ""
    # Of decoding and of resizing, as the worker says.
    seconds: tuple[float, float] = (0.0, 0.0)


_job_header = msgspec.msgpack.Decoder(_JobHeader)
_answer_header = msgspec.msgpack.Decoder(_AnswerHeader)


def send_job(connection: socket.socket, job: PictureJob) -> None:
    assert isinstance(job.source, bytes)
    _send_header(connection, _JobHeader(len(job.source), dict(job.parts), job.config, job.max_pixels))
    connection.sendall(job.source)


def receive_job(connection: socket.socket) -> PictureJob:
    header = _job_header.decode(_receive_header(connection))
    source = bytes(_receive_exactly(connection, header.num_bytes))
    # The name that the caller knows the picture by stays where it is needed.
    return PictureJob(source, "picture", header.parts, header.config, header.max_pixels)


def send_made(connection: socket.socket, made: Made) -> None:
    _send_header(connection, _AnswerHeader(seconds=made.seconds))
    for pixels in made.pixels.values():
        connection.sendall(np.ascontiguousarray(pixels).data)


def send_error(connection: socket.socket, error: Exception) -> None:
    message = error.message if isinstance(error, PictureError) else str(error)
    _send_header(connection, _AnswerHeader(type(error).__name__, message[:MAX_MESSAGE_CHARACTERS]))


def receive_answer(connection: socket.socket, job: PictureJob) -> Made | Exception:
    """A ConnectionError or a MsgspecError is raised, not returned: no answer came, and none will."""
    header = _answer_header.decode(_receive_header(connection))
    if header.error is None:
        pixels = {media_hash: _receive_pixels(connection, job.config) for media_hash in job.parts}
        return Made(pixels, header.seconds)
    if header.error in _ERRORS:
        return _ERRORS[header.error](job.field, header.message)
    return RuntimeError(f"a media worker failed: {header.error}: {header.message}")


def _receive_pixels(connection: socket.socket, config: ImageProcessorConfig) -> Pixels:
    pixels = np.empty((config.height, config.width, 3), np.uint8)
    _receive_into(connection, pixels.data.cast("B"))
    return pixels


def _send_header(connection: socket.socket, header: _JobHeader | _AnswerHeader) -> None:
    encoded = msgspec.msgpack.encode(header)
    assert len(encoded) <= MAX_HEADER_BYTES
    connection.sendall(len(encoded).to_bytes(4) + encoded)


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
