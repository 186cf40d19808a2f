"""Small films in the formats that people have, made when they are asked for."""

import io
from functools import cache

import av
import numpy as np

from keepsight.frontend.intake.open_film import FilmArray

WIDTH, HEIGHT, RATE = 64, 48, 10


@cache
def drawn_frames(num_frames: int = 20) -> FilmArray:
    """Each of its own brightness, which its number can be told by, with a grain that all have."""
    grain = np.random.default_rng(0).integers(0, 40, (HEIGHT, WIDTH, 3), np.uint8)
    return np.stack([grain + np.uint8(10 * number) for number in range(num_frames)])


@cache
def film(format_: str = "mp4", codec: str = "mpeg4", num_frames: int = 20, rotation: int = 0, **options: str) -> bytes:
    encoded = io.BytesIO()
    with av.open(encoded, "w", format=format_) as container:
        stream = container.add_stream(codec, rate=RATE, options={"threads": "1", **options})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = WIDTH, HEIGHT
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.set_display_rotation(rotation)
        for pixels in drawn_frames(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels).reformat(format=stream.pix_fmt)))
        container.mux(stream.encode())
    return encoded.getvalue()


# Format and codec.
KINDS = [
    ("mp4", "mpeg4"),
    ("mp4", "libx264"),
    ("webm", "libvpx-vp9"),
    ("matroska", "libx264"),
    ("avi", "mpeg4"),
    ("gif", "gif"),
]


def trimmed(data: bytes, num_kept: int) -> bytes:
    """An MP4 whose list of edits says that only its first frames are to be shown."""
    place = data.index(b"elst") + 12
    return data[:place] + (num_kept * 1000 // RATE).to_bytes(4) + data[place + 4 :]
