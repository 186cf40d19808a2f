"""What crosses between frontend and engine: plain values, no tensors of a device, no process.

A request carries the hash and the geometry of its media, never their pixels: they come by themselves (`coming_media`),
or the engine asks for those that it lacks, with `MediaNeeded`; either way as `MediaArrived`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from keepsight.media import MediaItem
from keepsight.sampling_params import SamplingParams

# [height, width, 3]; of embeddings that a caller computed their bytes, [tokens, hidden, 4], of a sound those of its
# samples, [samples, 1, 4]: see `pixels.py`.
Pixels = npt.NDArray[np.uint8]
Shape = tuple[int, int, int]
# "stop" when a token ended the answer by itself; stop strings are the frontend's business.
FinishReason = Literal["stop", "length"]
# As integers travel between processes.
MAX_PRIORITY = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Adapter:
    """Weights laid over the model's.  Its name alone would not tell two versions of it apart."""

    name: str
    digest: str
    # Whether it touches the tower or the projector, and so the embeddings.
    changes_encoder: bool = False


@dataclass(frozen=True, slots=True)
class PromptPin:
    """So much of a prompt's beginning its caller wants to be found again, for so long, if it can be."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ThoughtTokens:
    """Those between which an answer may first think: what form it is to have, it has behind them."""

    # None: the prompt has it already, and the answer begins within the thought.
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
    # Smaller goes first; equals in the order of their arrival.
    priority: int = 0
    # Requests share caches only with those of the same salt.
    cache_salt: str | None = None
    adapter: Adapter | None = None
    # Runs of tokens that no answer may hold: the params' `bad_words`, as this model writes them.
    banned_runs: tuple[tuple[int, ...], ...] = ()
    # Hashes of media whose pixels are being made already: the engine need not ask for them.
    coming_media: tuple[str, ...] = ()
    # Hashes of media of which only the uuid came: with this request nobody can make their pixels.
    unsent_media: tuple[str, ...] = ()
    pins: tuple[PromptPin, ...] = ()
    # What the answer may well be, by its caller.
    predicted: tuple[int, ...] = ()
    # None: the form holds from the first token on.
    thought: ThoughtTokens | None = None
    # What is asked for is not how the prompt goes on, but what the model made of it: told with its first token.
    wants_vector: bool = False

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Of an embedded prompt none: its `token_ids` only hold the places of its vectors."""
        return self.token_ids if all(item.is_picture for item in self.media) else ()

    @property
    def encoder_adapter(self) -> Adapter | None:
        """That which changes what its media become."""
        return self.adapter if self.adapter is not None and self.adapter.changes_encoder else None

    @property
    def num_image_tokens(self) -> int:
        """Of films, too."""
        return sum(item.span.length for item in self.media if item.is_picture and item.modality != "audio")

    @property
    def num_audio_tokens(self) -> int:
        return sum(item.span.length for item in self.media if item.modality == "audio")


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """The caller left (`choice` None), or needs no more of one choice: a stop string was found in it."""

    request_id: str
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class RingPlace:
    """Pixels that lie in a shared-memory ring."""

    ring_id: str
    entry_id: int
    offset: int
    num_bytes: int
    shape: Shape
    # Of this entry, and not to be guessed: another one's at the same place has another.
    signature: bytes


@dataclass(frozen=True, slots=True)
class StoredPixels:
    """Pixels that lie in the shared store under their media hash."""

    shape: Shape


# The pixels themselves, or where they can be read.
CarriedPixels = Pixels | RingPlace | StoredPixels


@dataclass(frozen=True, slots=True)
class MediaArrived:
    media_hash: str
    pixels: CarriedPixels


@dataclass(frozen=True, slots=True)
class ResetCaches:
    """Forgets what later requests could find; running ones keep what they use."""

    prefix: bool = False
    encoder: bool = False
    # Pixels, as far as the engine keeps any.
    processor: bool = False


ToEngine = EngineRequest | AbortRequest | MediaArrived | ResetCaches

# From the engine ----------------------------------------------------------------------------------------------


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token


# Of one token: itself first, then the most likely ones in its place.
TokenLogprobs = tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token of one of a request's `n` choices."""

    request_id: str
    choice: int
    token_id: int
    # When they were asked for.
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    # Of the prompt: how many of its tokens were found in the prefix cache when this choice began.
    num_cached_tokens: int = 0
    # With the first token of the first choice, when they were asked for: of all tokens of the prompt but its first.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    # When it was asked for: the hidden state after the prompt's last token, as the bytes of float32.
    vector: bytes | None = None
    # So far, of this choice's tokens: how many had been guessed.
    num_guessed: int = 0


@dataclass(frozen=True, slots=True)
class MediaStory:
    """Of one media item of a request.  Moments are of the machine's monotonic clock, which all its processes share."""

    # The tier whose embeddings were used; "prefix": none were needed; None: they were made, for this request.
    found_in: str | None
    # Of loading or encoding.
    began: float = 0.0
    ended: float = 0.0
    # When its pixels came to be encoded; whether the engine had kept them.
    arrived: float = 0.0
    were_kept: bool = False
    # How many were encoded at once, in the same time.
    num_together: int = 1


@dataclass(frozen=True, slots=True)
class RequestBegun:
    """A request has its first token: how it came to that.  Told again if more had to be made for its later ones."""

    request_id: str
    arrived: float
    # It had its first turn; its first token.
    began: float
    answered: float
    # In the order of its items.
    media: tuple[MediaStory, ...]


@dataclass(frozen=True, slots=True)
class MediaNeeded:
    request_id: str
    media_hashes: tuple[str, ...]
    # Where they were said to lie they were not: send the pixels themselves.
    inline: bool = False


@dataclass(frozen=True, slots=True)
class MediaHeld:
    """A hint for every frontend: something made of each of these is in a cache of the engine's now."""

    media_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MediaDropped:
    """A hint for every frontend: nothing made of any of these is in a cache of the engine's any more."""

    media_hashes: tuple[str, ...]


CacheWithTiers = Literal["encoder", "prefix"]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Of a place where embeddings, or keys and values, outlive the device's memory."""

    cache: CacheWithTiers
    name: str
    # Why it is set aside; None: it is used.
    reason: str | None
    num_bytes: int
    # None where the budget is the server's own.
    max_bytes: int | None
    num_entries: int
    # Entries that it gave: embeddings each in place of a decoding, a resizing, a transfer and an encoding.
    num_hits: int
    num_evictions: int
    num_damaged: int
    # Entries that were to be kept there, and are not: it was set aside, too slow, or full.
    num_left_out: int = 0


@dataclass(frozen=True, slots=True)
class TiersChanged:
    """For every frontend: how the engine's tiers are."""

    tiers: tuple[TierStatus, ...]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The last that is heard of a request that will get no (more) tokens."""

    request_id: str
    message: str
    # The request's own fault (it can never run here), not ours.
    is_refusal: bool = False
    # What in it is, if that can be said: `SamplingParams`' name.
    field: str | None = None


FromEngine = TokenOutput | RequestBegun | MediaNeeded | MediaHeld | MediaDropped | TiersChanged | RequestFailed
