"""The messages between frontend and engine: plain values, without device tensors or processes.

A request carries the hash and the geometry of its media, never their pixels. They come unasked (`coming_media`), or the
engine asks for those that it lacks with `MediaNeeded`; either way they arrive as `MediaArrived`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from keepsight.media import MediaItem
from keepsight.sampling_params import SamplingParams

# [height, width, 3]; or the bytes of embeddings that a caller computed, [tokens, hidden, 4], or of a sound's samples,
# [samples, 1, 4]: see `pixels.py`.
Pixels = npt.NDArray[np.uint8]
Shape = tuple[int, int, int]
# The most bytes of one item's pixels, or of what travels like them, on the whole way from their maker to the engine.
# Qwen2-VL's processor makes 308 MB of a photograph of 13 megapixels or more.
MAX_PIXEL_BYTES = 2**30
# "stop": a token ended the answer; stop strings are handled by the frontend.
FinishReason = Literal["stop", "length"]
# The limit of integers in messages between processes.
MAX_PRIORITY = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA weights applied on top of the model's. The digest distinguishes versions with the same name."""

    name: str
    digest: str
    # Whether it changes the tower or the projector, and so the embeddings of media.
    changes_encoder: bool = False


@dataclass(frozen=True, slots=True)
class PromptPin:
    """The caller wants the first `num_tokens` of the prompt to stay cached for `seconds`, if possible."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ThoughtTokens:
    """The tokens around an answer's initial thought; a required form applies only after the closing one."""

    # None: the prompt already contains it, and the answer begins inside the thought.
    opening: int | None
    closing: int


# To the engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: str
    token_ids: tuple[int, ...]
    # In the order of their spans.
    media: tuple[MediaItem, ...]
    sampling_params: SamplingParams
    # Smaller goes first; ties go by arrival.
    priority: int = 0
    # Requests share caches only with those of the same salt.
    cache_salt: str | None = None
    adapter: Adapter | None = None
    # Token sequences that no answer may contain: the params' `bad_words`, as this model tokenizes them.
    banned_runs: tuple[tuple[int, ...], ...] = ()
    # Hashes of media whose pixels are already being made: the engine need not ask for them.
    coming_media: tuple[str, ...] = ()
    # Hashes of media of which only the uuid came: their pixels cannot be made from this request.
    unsent_media: tuple[str, ...] = ()
    pins: tuple[PromptPin, ...] = ()
    # Tokens of a likely answer, predicted by the caller.
    predicted: tuple[int, ...] = ()
    # None: the form holds from the first token on.
    thought: ThoughtTokens | None = None
    # An embedding request: it wants the hidden state of the prompt, which comes with its first token.
    wants_vector: bool = False

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """The prompt's token ids; empty for an embedded prompt, whose `token_ids` are only placeholders."""
        return self.token_ids if all(item.is_picture for item in self.media) else ()

    @property
    def encoder_adapter(self) -> Adapter | None:
        """The request's adapter if it changes the embeddings of media, else None."""
        return self.adapter if self.adapter is not None and self.adapter.changes_encoder else None

    @property
    def num_image_tokens(self) -> int:
        """The number of tokens of pictures and films."""
        return sum(item.span.length for item in self.media if item.is_picture and item.modality != "audio")

    @property
    def num_audio_tokens(self) -> int:
        return sum(item.span.length for item in self.media if item.modality == "audio")


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """The caller disconnected (`choice` None), or one choice is finished as a stop string was found in it."""

    request_id: str
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class RingPlace:
    """Where pixels are stored in a shared-memory ring."""

    ring_id: str
    entry_id: int
    offset: int
    num_bytes: int
    shape: Shape
    # Unguessable and unique to this entry: another entry at the same offset has another one.
    signature: bytes


@dataclass(frozen=True, slots=True)
class StoredPixels:
    """The pixels are in the shared store, under their media hash."""

    shape: Shape


# The pixels themselves, or where they can be read.
CarriedPixels = Pixels | RingPlace | StoredPixels


@dataclass(frozen=True, slots=True)
class MediaArrived:
    media_hash: str
    pixels: CarriedPixels


@dataclass(frozen=True, slots=True)
class ResetCaches:
    """Empty the chosen caches for later requests; running ones keep what they use.

    Answered by one `CachesReset`, of which all frontends hear, once the tiers are empty, too: no later engine finds
    anything.
    """

    # As in `FindMedia`.
    query_id: str
    prefix: bool = False
    encoder: bool = False
    # Pixels, if the engine caches any.
    processor: bool = False


@dataclass(frozen=True, slots=True)
class FindMedia:
    """Asks where all of these media items are held together; answered by one `MediaFound`, to the asker alone."""

    # Unguessable and unique among those of all frontends.
    query_id: str
    media_hashes: tuple[str, ...]


ToEngine = EngineRequest | AbortRequest | MediaArrived | ResetCaches | FindMedia


@dataclass(frozen=True, slots=True)
class UnreadableMedia:
    """A `MediaArrived` could not be read: never sent, but put in its place where it was received."""

    media_hash: str
    reason: str


# What an engine's end of a connection hands on.
Received = ToEngine | UnreadableMedia

# From the engine ----------------------------------------------------------------------------------------------


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token


# For one token: itself first, then the most likely ones in its place.
TokenLogprobs = tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token of one of a request's `n` choices."""

    request_id: str
    choice: int
    token_id: int
    # If requested.
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    # Number of prompt tokens that were found in the prefix cache when this choice began.
    num_cached_tokens: int = 0
    # If requested, with the first token of the first choice: for all tokens of the prompt except its first.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    # If requested: the hidden state after the prompt's last token, as the bytes of float32.
    vector: bytes | None = None
    # Number of this choice's tokens so far that had been guessed.
    num_guessed: int = 0


@dataclass(frozen=True, slots=True)
class MediaReport:
    """How one media item of a request was served. Times are the machine's monotonic clock, shared by its processes."""

    # The tier whose embeddings were used; "prefix": none were needed; None: they were encoded for this request.
    found_in: str | None
    # Start and end of loading or encoding.
    began: float = 0.0
    ended: float = 0.0
    # When its pixels arrived for encoding, and whether they came from the engine's cache.
    arrived: float = 0.0
    was_cached: bool = False
    # Number of items encoded together, in the same time.
    num_together: int = 1


@dataclass(frozen=True, slots=True)
class RequestBegun:
    """A request has its first token; tells how it got there. Sent again if later tokens needed more to be made."""

    request_id: str
    arrived: float
    # The time of its first turn, and of its first token.
    began: float
    answered: float
    # In the order of its items.
    media: tuple[MediaReport, ...]


@dataclass(frozen=True, slots=True)
class MediaNeeded:
    request_id: str
    media_hashes: tuple[str, ...]
    # True if the pixels were not where they were said to be: send the pixels themselves.
    inline: bool = False


@dataclass(frozen=True, slots=True)
class MediaHeld:
    """A hint for every frontend: the engine's caches now hold something made of each of these."""

    media_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MediaDropped:
    """A hint for every frontend: the engine's caches no longer hold anything made of any of these."""

    media_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MediaFound:
    query_id: str
    # The tiers known to hold the embeddings, without an adapter, of every item.
    embeddings: tuple[str, ...]
    # Whether keys and values on the device can be found that cover tokens of every item.
    is_in_prefixes: bool


@dataclass(frozen=True, slots=True)
class CachesReset:
    query_id: str


CacheWithTiers = Literal["encoder", "prefix"]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Status of a tier: a place where embeddings, or keys and values, outlive the device's memory."""

    cache: CacheWithTiers
    name: str
    # Why it is set aside; None: it is in use.
    reason: str | None
    num_bytes: int
    # None if the tier's server sets its own limit.
    max_bytes: int | None
    num_entries: int
    # Entries loaded from it: of embeddings, each spares a decoding, a resizing, a transfer and an encoding.
    num_hits: int
    num_evictions: int
    num_damaged: int
    # Entries that were not stored because it was set aside, too slow, or full.
    num_left_out: int = 0


@dataclass(frozen=True, slots=True)
class TiersChanged:
    """For every frontend: the status of the engine's tiers."""

    tiers: tuple[TierStatus, ...]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The last message about a request that will get no (more) tokens."""

    request_id: str
    message: str
    # True if the request is at fault (it can never run here), not the server.
    is_refusal: bool = False
    # The field at fault, by its name in `SamplingParams`, if known.
    field: str | None = None


FromEngine = (
    TokenOutput
    | RequestBegun
    | MediaNeeded
    | MediaHeld
    | MediaDropped
    | MediaFound
    | CachesReset
    | TiersChanged
    | RequestFailed
)
