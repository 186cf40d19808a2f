"""Facts about one picture, film or sound that all layers share: its token positions, its size, its name.

No pixels, no tensors. `TokenSpan` is the only place where spans are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, get_args

# An item's content: a picture, two frames of a film, a sound, embeddings of a picture that the caller computed, or a
# strip of a prompt's embeddings.
Modality = Literal["image", "video", "audio", "image_embeds", "prompt_embeds"]
# Modalities of pixels or samples, from which an encoder computes embeddings.
ENCODED: tuple[Modality, ...] = ("image", "video", "audio")
# The kinds of media that a caller sends and a prompt has markers for; a picture's embeddings count as a picture.
Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Plurals for error messages.
SEVERAL: Mapping[Kind, str] = {"image": "pictures", "video": "videos", "audio": "sounds"}
# Where embeddings may be held, nearest first.
EMBEDDING_TIERS = ("device", "host", "disk", "remote")
# Number of frames in a moment; in its pixels they are stacked vertically.
FRAMES_PER_MOMENT = 2
# Default limit of pixels per picture.
DEFAULT_MAX_PIXELS = 64_000_000
# Upper bound of that limit: Pillow's decoders of WebP, TIFF and GIF refuse more by themselves.
MAX_PIXELS = 178_956_970
# Length of a strip where pictures differ in length, or the model takes none. Otherwise a strip is as long as a picture,
# so that every buffer with room for a picture has room for it.
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
        """Return whether a boundary just before `position` leaves a part of this span on either side."""
        return self.start < position < self.end

    def __contains__(self, position: int) -> bool:
        return self.start <= position < self.end


def find_runs(token_ids: Sequence[int], wanted: int, start: int = 0) -> Iterator[TokenSpan]:
    """Yield the spans of the wanted token; the first of `token_ids` has the position `start`."""
    for token_id, run in groupby(token_ids):
        length = sum(1 for _ in run)
        if token_id == wanted:
            yield TokenSpan(start, length)
        start += length


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The frames that somebody has already chosen from a longer film: the number of each there, and how many it has."""

    numbers: tuple[int, ...]
    num_frames_of_whole: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A film's number of frames, and its frame rate."""

    num_frames: int
    frames_per_second: float
    # If these frames were chosen from a longer film, whose rate this is; all of them are shown.
    excerpt: Excerpt | None = None

    @property
    def num_frames_of_whole(self) -> int:
        return self.num_frames if self.excerpt is None else self.excerpt.num_frames_of_whole

    def number_in_whole(self, number: int) -> int:
        return number if self.excerpt is None else self.excerpt.numbers[number]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The size of a picture as it is shown (after EXIF orientation), or of a film's frame, in pixels.

    A sound has only a length, no width or height.
    """

    width: int = 0
    height: int = 0
    # For a film, as it was sent.
    timeline: Timeline | None = None
    # For a sound, at the model's sampling rate.
    num_samples: int = 0


class KnownContent(NamedTuple):
    """The results of inspecting some content, so that it need not be inspected again."""

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
    """The indices of two frames of a film that become one picture; an unpaired last frame is used twice."""

    first: int
    last: int


# The part of a medium that becomes one item: a crop, two frames of a film, or the whole (None).
Part = CropBox | Moment | None


def frames_of(modality: Modality) -> int:
    """Return the number of frames shown as one picture."""
    return FRAMES_PER_MOMENT if modality == "video" else 1


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """The layout in a prompt of a picture with its crops, of a film's moments, or of a sound."""

    # Tokens of the whole and of each crop, of each moment, or of the sound.
    tokens_per_part: int
    num_crops: int = 0
    # As in `MediaItem`.
    columns: int = 0
    # For a film, the time of each moment: either in seconds, stated by the text before each moment,
    times: tuple[float, ...] = ()
    # or in rotary positions of the decoder, counted from the first moment; then the moments follow each other directly.
    places: tuple[int, ...] = ()
    kind: Kind = "image"
    # For a picture laid out by a borrowed processor: its tokens, some of which may stand for no embedding; and the size
    # in bytes of the processor's output for a picture of this size.
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

    # A digest of everything that its embeddings depend on, except the model.
    media_hash: str
    span: TokenSpan
    geometry: Geometry
    modality: Modality = "image"
    # True if it is part of the same picture or film as the item before it: one decoding gives the pixels of both.
    is_further_part: bool = False
    # Number of tokens in a row of the picture, for models that distinguish rows and columns; 0: there are no rows.
    columns: int = 0
    # For a further moment of the film of the item before it: its rotary position relative to the film's first moment.
    # None: its rotary positions follow those of everything before it.
    rotary_offset: int | None = None

    @property
    def is_picture(self) -> bool:
        """False for a strip of a prompt, whose tokens attend only backward. Others' may attend in both directions."""
        return self.modality != "prompt_embeds"
