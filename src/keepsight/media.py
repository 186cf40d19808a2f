"""What every layer knows about one picture: where its tokens lie, how large it is, what it is called.

Knows nothing of pixels or tensors.  `TokenSpan` is the only place where spans are compared.
"""

from dataclasses import dataclass
from typing import Literal

# What an item is made of: a picture, or its embeddings, which a caller computed.
Modality = Literal["image", "image_embeds"]


@dataclass(frozen=True, slots=True, order=True)
class TokenSpan:
    """The half-open interval [start, start + length) of positions in one request."""

    start: int
    length: int

    def __post_init__(self) -> None:
        assert self.start >= 0, self
        assert self.length > 0, self

    @property
    def end(self) -> int:
        return self.start + self.length

    def overlaps(self, other: "TokenSpan") -> bool:
        return self.start < other.end and other.start < self.end

    def is_cut_by(self, position: int) -> bool:
        """Whether a boundary just before `position` leaves a part of this span on either side."""
        return self.start < position < self.end

    def __contains__(self, position: int) -> bool:
        return self.start <= position < self.end


@dataclass(frozen=True, slots=True)
class Geometry:
    """The size of a picture as it will be looked at (after EXIF orientation), in pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class CropBox:
    """A rectangle inside a picture, in its own pixels."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One thing that the encoder turns into the embeddings of one span: a picture, or one crop of it."""

    # Names everything that its embeddings depend on, but for the model.
    media_hash: str
    span: TokenSpan
    geometry: Geometry
    modality: Modality = "image"
