"""Small films in common formats, made on demand."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np

from keepsight.frontend.intake.open_film import FilmArray, FilmSource

WIDTH, HEIGHT, RATE = 64, 48, 10


@cache
def drawn_frames(num_frames: int = 20) -> FilmArray:
    """Return frames that can be told apart by their brightness, all with the same grain."""
    grain = np.random.default_rng(0).integers(0, 40, (HEIGHT, WIDTH, 3), np.uint8)
    return np.stack([grain + np.uint8(10 * number) for number in range(num_frames)])


@cache
def film(
    format_: str = "mp4",
    codec: str = "mpeg4",
    num_frames: int = 20,
    rotation: int = 0,
    title: str = "",
    width: int = WIDTH,
    **options: str,
) -> bytes:
    encoded = io.BytesIO()
    with av.open(encoded, "w", format=format_) as container:
        container.metadata["title"] = title
        stream = container.add_stream(codec, rate=RATE, options={"threads": "1", **options})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = width, HEIGHT
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.set_display_rotation(rotation)
        for pixels in drawn_frames(num_frames):
            kept = np.ascontiguousarray(pixels[:, :width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(kept).reformat(format=stream.pix_fmt)))
        container.mux(stream.encode())
    return encoded.getvalue()


def recording(milliseconds: Sequence[int]) -> bytes:
    """Return a WebM of frames at these times that, like those of browsers, states no duration of a frame."""
    encoded = io.BytesIO()
    with av.open(encoded, "w", format="webm") as container:
        stream = container.add_stream("libvpx", rate=RATE, options={"threads": "1"})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for pixels, time in zip(drawn_frames(len(milliseconds)), milliseconds, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels).reformat(format="yuv420p")
            frame.pts, frame.time_base = time, stream.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    data, default_duration, void = encoded.getvalue(), b"\x23\xe3\x83\x84", b"\xec\x86" + bytes(6)
    place = data.index(default_duration)
    return data[:place] + void + data[place + len(void) :]


def repacked(data: bytes, format_: str, change: Callable[[int, bytes], bytes | None]) -> bytes:
    """Return a film of what `change` makes of each packet, given its number; those that are None are left out."""
    encoded = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as given, av.open(encoded, "w", format=format_) as container:
        stream = container.add_stream_from_template(given.streams.video[0])
        for number, packet in enumerate(given.demux(given.streams.video[0])):
            if packet.size and (content := change(number, bytes(packet))) is not None:
                made = av.Packet(content)
                made.pts, made.dts, made.time_base = packet.pts, packet.dts, packet.time_base
                made.duration, made.is_keyframe, made.stream = packet.duration, packet.is_keyframe, stream
                container.mux(made)
    return encoded.getvalue()


def cut_between_key_frames(format_: str, num_between: int) -> bytes:
    """Return a film whose first packets refer to frames that were cut off; `num_between` others are shown earlier."""
    options = f"open-gop=1:keyint=10:min-keyint=10:scenecut=0:bframes={num_between}"
    whole = film(format_, "libx264", **{"x264-params": options})
    return repacked(whole, format_, lambda number, packet: packet if number > 3 else None)


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
    """Return an MP4 whose edit list shows only its first frames."""
    place = data.index(b"elst") + 12
    return data[:place] + (num_kept * 1000 // RATE).to_bytes(4) + data[place + 4 :]


def covered(data: bytes, cover: bytes) -> bytes:
    """Return an MP4 (with its index at the end) with a JPEG cover before all streams, as music files have."""
    names = bytes(4) + _box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    listed = _box(b"covr", _box(b"data", (13).to_bytes(4) + bytes(4) + cover))
    added = _box(b"udta", _box(b"meta", names + _box(b"ilst", listed)))
    place = data.index(b"moov") - 4
    return data[:place] + _box(b"moov", added + data[place + 8 :])


def _box(name: bytes, content: bytes) -> bytes:
    return (len(content) + 8).to_bytes(4) + name + content


@dataclass(frozen=True, slots=True)
class FilmCase:
    name: str
    source: FilmSource
    # Options of the processor besides the published ones.
    options: dict[str, Any] = field(default_factory=dict)
    processor: str = "Qwen3VLVideoProcessor"


def film_cases() -> tuple[FilmCase, ...]:
    noise = np.random.default_rng(1).integers(0, 256, (9, 61, 83, 3), np.uint8)
    small, enlarged = (
        {"shortest_edge": 4096, "longest_edge": 3 * 64 * 64},
        {"shortest_edge": 99_999, "longest_edge": 999_999},
    )
    capped = {"cap_pixels_per_frame": True, "max_video_tokens": 9}
    older = "Qwen2VLVideoProcessor"
    return (
        FilmCase("film: an array", drawn_frames()),
        FilmCase("film: an odd number of frames", noise, {"fps": 14}),
        FilmCase("film: made smaller", noise, {"size": small}),
        FilmCase("film: made larger", noise, {"size": enlarged}),
        FilmCase("film: capped", noise, {"size": enlarged, **capped}),
        FilmCase("film: bilinear", noise, {"resample": 2}),
        # qp is fixed, as rate control depends in its last bits on what the process did before; two processes make this.
        FilmCase("film: h264", film(codec="libx264", qp="20"), {"fps": 5}),
        FilmCase("film: mpeg4", film(), {"max_frames": 6, "fps": 10}),
        FilmCase("film: each frame as a picture", noise, {"fps": 14}, older),
        FilmCase("film: each frame enlarged", noise, {"fps": 24, "size": enlarged}, older),
        FilmCase("film: each frame capped", noise, {"num_frames": 5, "size": small, **capped}, older),
        FilmCase("film: a file of frames as pictures", film(codec="libx264", qp="20"), {"fps": 5}, older),
    )
