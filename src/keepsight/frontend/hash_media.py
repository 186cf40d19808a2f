"""The media hash: one name for everything that the embeddings of a picture or crop depend on.

Nothing is decoded for it, but for PIL images that somebody opened without loading them.  What is hashed could be read
back: every value is tagged by its kind and framed by its length, so that values which differ have hashes that differ.
"""

import dataclasses
import struct
from collections.abc import Iterable, Iterator

from blake3 import blake3

from keepsight.frontend.open_picture import PictureSource
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import CropBox


def hash_values(**parts: object) -> str:
    """Of None, bool, int, float, str, bytes, and lists, tuples and dicts of these; lists are tuples."""
    hasher = blake3()
    for chunk in _frame(parts):
        hasher.update(chunk)
    return hasher.hexdigest()


def hash_content(source: PictureSource) -> str:
    """Of the bytes as they were received, or of all that decoding a PIL image looks at."""
    if isinstance(source, bytes):
        return hash_values(received=source)
    pixels, palette = source.tobytes(), source.getpalette("RGBA")
    return hash_values(
        mode=source.mode,
        size=source.size,
        pixels=pixels,
        palette=None if palette is None else bytes(palette),
        transparency=source.info.get("transparency"),
    )


class MediaHasher:
    """Names the pictures of one request, and their crops."""

    def __init__(self, model_id: str, config: ImageProcessorConfig, cache_salt: str | None) -> None:
        self._shared_parts = {
            "model": model_id,
            "processor": _options_of_all(config),
            "cache_salt": cache_salt,
            "modality": "image",
        }

    def hash_parts(self, source: PictureSource, crops: Iterable[CropBox | None]) -> Iterator[str]:
        """One for each crop of a picture; None is the whole."""
        content = hash_content(source)
        for crop in crops:
            box = None if crop is None else dataclasses.astuple(crop)
            yield hash_values(content=content, crop=box, **self._shared_parts)


def _options_of_all(config: ImageProcessorConfig) -> dict[str, object]:
    """Without those that choose the crops: the boxes say it, and the whole is the same picture whether or not."""
    options = dataclasses.asdict(config)
    return {name: value for name, value in options.items() if "pan_and_scan" not in name}


def _frame(value: object) -> Iterator[bytes]:
    """Large bytes pass through as they are."""
    match value:
        case None:
            yield b"N"
        case bool():  # before int, which it is too
            yield b"T" if value else b"F"
        case int():
            yield from _frame_bytes(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        case float():
            yield from _frame_bytes(b"f", struct.pack("<d", value))
        case str():
            yield from _frame_bytes(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes():
            yield from _frame_bytes(b"b", value)
        case list() | tuple():
            yield _head(b"l", len(value))
            for each in value:
                yield from _frame(each)
        case dict():
            yield _head(b"d", len(value))
            framed = {b"".join(_frame(key)): inner for key, inner in value.items()}
            for key in sorted(framed):
                yield key
                yield from _frame(framed[key])
        case _:
            raise TypeError(f"a {type(value).__name__} has no media hash")


def _frame_bytes(tag: bytes, content: bytes) -> Iterator[bytes]:
    yield _head(tag, len(content))
    yield content


def _head(tag: bytes, length: int) -> bytes:
    return tag + length.to_bytes(8, "little")
