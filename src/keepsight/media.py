"""What every layer knows about one picture, film or sound: where its tokens lie, how large it is, what it is called.

Knows nothing of pixels or tensors.  `TokenSpan` is the only place where spans are compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

# What an item is made of: a picture, two frames of a film, a sound, the embeddings of a picture, which a caller
# computed, or a strip of a prompt's.
Modality = Literal["image", "video", "audio", "image_embeds", "prompt_embeds"]
# Of pixels or samples, which an encoder makes embeddings of.
ENCODED: tuple[Modality, ...] = ("image", "video", "audio")
# What a caller sends and a prompt marks: embeddings of a picture stand where it would.
Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# As refusals call several of them.
SEVERAL: Mapping[Kind, str] = {"image": "pictures", "video": "videos", "audio": "sounds"}
# The frames of a moment, one above the other in its pixels.
FRAMES_PER_MOMENT = 2
# Of one picture, where nobody says otherwise.
DEFAULT_MAX_PIXELS = 64_000_000
# Of one picture, whatever anybody says: Pillow's decoders of WebP, TIFF and GIF refuse more by themselves.
MAX_PIXELS = 178_956_970
# A strip is as long as a picture, so that whatever has room for one has room for it; where pictures differ in that, or
# there are none:
TOKENS_PER_STRIP = 64


@dataclass(frozen=True, slots=True)
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
class Timeline:
    """How many frames a film has, and how many of them are shown in a second."""

    num_frames: int
    frames_per_second: float


@dataclass(frozen=True, slots=True)
class Geometry:
    """The size of a picture as it will be looked at (after EXIF orientation), in pixels; of a film that of a frame.

    Of a sound its length alone: it has neither width nor height.
    """

    width: int = 0
    height: int = 0
    # Of a film as it was sent.
    timeline: Timeline | None = None
    # Of a sound, at the rate at which the model takes it.
    num_samples: int = 0


class KnownContent(NamedTuple):
    """What looking at a content has taught: it need not be looked at again."""

    name: str
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class CropBox:
    """A rectangle inside a picture, in its own pixels."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Moment:
    """Two frames of a film, by their numbers, that become one picture; a last one that is alone, twice."""

    first: int
    last: int


# What becomes an item of its own: the whole picture, a crop of it, two frames of a film.
Part = CropBox | Moment | None


def frames_of(modality: Modality) -> int:
    """How many are shown as one picture."""
    return FRAMES_PER_MOMENT if modality == "video" else 1


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """How a picture with its crops, a film's moments, or a sound will lie in a prompt."""

    # Of the whole and of each crop, of each moment, or of the sound.
    tokens_per_part: int
    num_crops: int = 0
    # As a `MediaItem` has it.
    columns: int = 0
    # Of a film, when each of its moments is: in seconds, which the text before it tells, or else
    times: tuple[float, ...] = ()
    # in places of a decoder's rotation, counted from the first one; then they lie one behind the other.
    places: tuple[int, ...] = ()
    kind: Kind = "image"
    # Of a picture that another processor than ours lays out: its tokens, with others among them that are none of its
    # embeddings; and the bytes of all that it makes of one so large.
    token_ids: tuple[int, ...] = ()
    num_bytes: int = 0

    @property
    def num_parts(self) -> int:
        return len(self.times or self.places) or 1 + self.num_crops

    @property
    def num_tokens(self) -> int:
        return self.num_parts * self.tokens_per_part


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One thing that becomes the embeddings of one span: a picture, a crop of it, two frames of a film, a sound, or a
    strip of an embedded prompt.
    """

    # Names everything that its embeddings depend on, but for the model.
    media_hash: str
    span: TokenSpan
    geometry: Geometry
    modality: Modality = "image"
    # Of the same picture or film as the item before it: the pixels of both are made of one decoding.
    is_further_part: bool = False
    # So many of its tokens are a row of the picture, to models that tell rows and columns apart; 0: to none.
    columns: int = 0
    # By so many places a decoder's rotation has it later than the first moment of the film that the item before it is
    # of, too, and goes on with.  None: it begins behind all before it.
    places_later: int | None = None

    @property
    def is_picture(self) -> bool:
        """Its tokens see each other in both directions; those of a prompt only what was before them."""
        return self.modality != "prompt_embeds"
