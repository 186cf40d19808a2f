"""Small sounds in common formats, made on demand."""

import io
import struct
import wave
from functools import cache

import av
import numpy as np
import numpy.typing as npt

RATE = 16_000
Ints = npt.NDArray[np.int16]


@cache
def drawn(num_samples: int = 8_000, num_channels: int = 1) -> Ints:
    """Return [samples, channels]: a rising tone with a little noise, different in each channel."""
    seconds = np.arange(num_samples)[:, None] / RATE
    tones = np.sin(2 * np.pi * (300 + 400 * seconds + 100 * np.arange(num_channels)) * seconds) * 9_000
    return (tones + np.random.default_rng(0).normal(0, 300, tones.shape)).astype(np.int16)


def as_floats(ints: Ints) -> npt.NDArray[np.float32]:
    """Convert as soundfile does, and mix several channels to one as librosa does."""
    floats: npt.NDArray[np.float32] = np.mean((ints / np.float32(32_768)).T, axis=0)
    return floats


@cache
def wav(num_samples: int = 8_000, num_channels: int = 1, rate: int = RATE) -> bytes:
    """Return a WAV file written by Python's `wave` module."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(num_channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(drawn(num_samples, num_channels).tobytes())
    return written.getvalue()


def wav_of(
    values: bytes, kind: int = 1, bits: int = 16, num_channels: int = 1, rate: int = RATE, extension: bytes = b""
) -> bytes:
    """Return a WAV file of any kind, with an unknown chunk before its samples."""
    block = num_channels * bits // 8
    described = struct.pack("<HHIIHH", kind, num_channels, rate, rate * block, block, bits) + extension
    chunks = _chunk(b"fmt ", described) + _chunk(b"LIST", b"odd") + _chunk(b"data", values)
    return b"RIFF" + (len(chunks) + 4).to_bytes(4, "little") + b"WAVE" + chunks


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + len(content).to_bytes(4, "little") + content + bytes(len(content) % 2)


@cache
def sound(
    format_: str, codec: str, num_samples: int = 8_000, num_channels: int = 1, rate: int = RATE, title: str = ""
) -> bytes:
    encoded = io.BytesIO()
    with av.open(encoded, "w", format=format_) as container:
        container.metadata["title"] = title
        stream = container.add_stream(codec, rate=rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = {1: "mono", 2: "stereo", 8: "7.1"}[num_channels]
        packed = drawn(num_samples, num_channels).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=stream.layout.name)
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.format, stream.layout, stream.rate, frame_size=stream.frame_size)
        for each in [*resampler.resample(frame), *resampler.resample(None), None]:
            container.mux(stream.encode(each))
    return encoded.getvalue()


# Format, codec, and a sample rate that the codec supports.
KINDS = [
    ("flac", "flac", 16_000),
    ("mp3", "libmp3lame", 44_100),
    ("ogg", "libopus", 48_000),
    ("adts", "aac", 16_000),
    ("ipod", "aac", 44_100),
    ("webm", "libopus", 48_000),
]
