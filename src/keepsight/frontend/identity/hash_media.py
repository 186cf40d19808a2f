"""The media hash: one name for everything that the embeddings of a picture, a crop, a moment or a sound depend on.

Nothing is decoded for it, except PIL images that were opened without being loaded. The hashed bytes are an unambiguous
encoding: every value is tagged with its type and framed by its length, so that different values have different hashes,
and content, uuids and EXIF identities can never be mistaken for one another.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Literal, Protocol
from uuid import UUID

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from keepsight.borrowed import BorrowedProcessor
from keepsight.frontend.intake.open_film import FilmSource
from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.frontend.intake.read_document import PageSource
from keepsight.frontend.intake.read_embeds import Embeds
from keepsight.frontend.intake.sound_samples import Samples, SoundSource
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import Geometry, Modality, Moment, Part
from keepsight.requests import Pixels
from keepsight.sound_config import SoundConfig

# A file's bytes, or an object of this process.
Source = PictureSource | FilmSource | SoundSource | Embeds | PageSource
# The options by which it is prepared.
PartConfig = ImageProcessorConfig | SoundConfig | BorrowedProcessor


class _Hasher(Protocol):
    def update(self, chunk: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


_HASHERS: dict[str, Callable[[], _Hasher]] = {
    "blake3": blake3,
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
}

# Longer salts are hashed each time, so that clients cannot fill the memory with them.
MAX_KEPT_SALT = 256


def hash_values(algorithm: str, /, **parts: object) -> str:
    """Hash None, bool, int, float, str, bytes, and lists, tuples and dicts of these; a list hashes like a tuple."""
    hasher = _HASHERS[algorithm]()
    for chunk in _frame(parts):
        hasher.update(chunk)
    return hasher.hexdigest()


def hash_content(source: Source, algorithm: str) -> str:
    """Hash the bytes as they were received, or everything that decoding a PIL image or an array depends on."""
    if isinstance(source, bytes):
        return hash_values(algorithm, received=source)
    if isinstance(source, PageSource):
        return hash_values(algorithm, document=source.name, page=source.number)
    if isinstance(source, Embeds):
        values = source.values
        return hash_values(algorithm, embeds=_bytes_of(values), dtype=str(values.dtype), shape=values.shape)
    if isinstance(source, Samples):
        return hash_values(algorithm, samples=_bytes_of(source.values), sampling_rate=source.sampling_rate)
    if isinstance(source, np.ndarray):
        return hash_values(algorithm, dtype=str(source.dtype), shape=source.shape, data=_bytes_of(source))
    pixels, palette = source.tobytes(), source.getpalette("RGBA")
    return hash_values(
        algorithm,
        mode=source.mode,
        size=source.size,
        pixels=pixels,
        palette=None if palette is None else bytes(palette),
        transparency=source.info.get("transparency"),
    )


def hash_content_for_tenant(
    content: str, modality: Modality | Literal["document"], cache_salt: str | None, algorithm: str
) -> str:
    """Hash content with its tenant's salt, so that timing does not reveal to others what a tenant has sent."""
    return hash_values(algorithm, content=content, modality=modality, cache_salt=cache_salt)


def hash_client_uuid(uuid: str, modality: Modality, cache_salt: str | None, algorithm: str) -> str:
    """Hash a uuid that stands for the content because the client says so. No content and no other tenant's uuid has
    this name. A client may use one uuid for a picture, a film, a sound and the embeddings of any.
    """
    return hash_values(algorithm, client_uuid=uuid, modality=modality, cache_salt=cache_salt)


def hash_exif_image_id(image_id: UUID, algorithm: str) -> str:
    """Hash the ImageID that stands for the content because the file says so."""
    return hash_values(algorithm, exif_image_id=image_id.bytes)


class MediaHasher:
    """Computes the names of one request's pictures and their crops, of its films, or of its sounds."""

    def __init__(
        self,
        model_id: str,
        config: PartConfig,
        cache_salt: str | None,
        algorithm: str,
        modality: Modality = "image",
    ) -> None:
        self._algorithm = algorithm
        is_short = cache_salt is None or len(cache_salt) <= MAX_KEPT_SALT
        hash_terms = _hash_terms if is_short else _hash_terms.__wrapped__
        self._terms = hash_terms(algorithm, model_id, config, cache_salt, modality)

    def hash_parts(self, content: str, geometry: Geometry, parts: Iterable[Part]) -> Iterator[str]:
        """Yield a name for each part of a picture or a film. The part None is the whole, as for a sound."""
        film: str | None = None
        for part in parts:
            if not isinstance(part, Moment):
                yield self._hash_item(geometry, part, content=content)
                continue
            # There may be hundreds of moments, which differ only in two numbers.
            film = film or self._hash_item(geometry, None, content=content)
            yield hash_values(self._algorithm, film=film, first=part.first, last=part.last)

    def hash_pixels(self, pixels: Pixels, geometry: Geometry, part: Part) -> str:
        """Return a hash that two items share only if the model is shown, and the engine is told, the same of them.

        The time of a moment is left out: the text before it or its item tells it, so equal pixels have one hash.
        """
        shown = None if isinstance(part, Moment) else part
        return self._hash_item(geometry, shown, shape=pixels.shape, pixels=_bytes_of(pixels))

    def _hash_item(self, geometry: Geometry, part: Part, **shown: object) -> str:
        size = (geometry.num_samples,) if geometry.num_samples else (geometry.width, geometry.height)
        numbers = None if part is None else dataclasses.astuple(part)
        return hash_values(self._algorithm, terms=self._terms, geometry=size, crop=numbers, **shown)


@lru_cache(maxsize=256)
def _hash_terms(algorithm: str, model_id: str, config: PartConfig, cache_salt: str | None, modality: Modality) -> str:
    """Hash the terms that most requests share. Cached: apart from the content, they are the slowest part of a name."""
    return hash_values(
        algorithm,
        # Two algorithms whose digests are equally long must not give the same name.
        algorithm=algorithm,
        model=model_id,
        processor=_options_of_all(config),
        cache_salt=cache_salt,
        modality=modality,
    )


def _options_of_all(config: PartConfig) -> dict[str, object]:
    """Return the options that belong in a name.

    Left out are those that choose the crops (each crop's box is hashed, and the whole is the same with or without
    crops), those that choose the size (a settled configuration has height and width), and the directory of a
    checkpoint's own processor.
    """
    options, left_out = dataclasses.asdict(config), ("sizes", "directory")
    return {name: value for name, value in options.items() if "pan_and_scan" not in name and name not in left_out}


def _bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    """Return the bytes in C order; they are copied only if the array is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _frame(value: object) -> Iterator[bytes | memoryview]:
    """Encode a value unambiguously, in chunks; large bytes are not copied."""
    match value:
        case np.generic():  # some are also Python numbers or strings, but not all
            raise TypeError(f"a {type(value).__name__} has no media hash")
        case None:
            yield b"N"
        case bool():  # before int, of which it is a subclass
            yield b"T" if value else b"F"
        case int():
            yield from _frame_bytes(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        case float():
            yield from _frame_bytes(b"f", struct.pack("<d", value))
        case str():
            yield from _frame_bytes(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes() | memoryview():
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


def _frame_bytes(tag: bytes, content: bytes | memoryview) -> Iterator[bytes | memoryview]:
    yield _head(tag, memoryview(content).nbytes)
    yield content


def _head(tag: bytes, length: int) -> bytes:
    return tag + length.to_bytes(8, "little")
