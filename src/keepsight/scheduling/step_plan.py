"""All that the runner is told of a step, and all that is heard from it: plain values.

Two lanes.  What lies in `now` is computed at once, as one batch, and the step ends with it.  What lies in `beside` and
`encode` is begun, runs beside this step and the next ones, and is reported by the step in which it is found finished.
A sequence has at most one slice under way, guesses behind it aside, so no lane ever waits for the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keepsight.media import Modality
from keepsight.requests import Adapter, EngineRequest, TokenLogprobs

# Request id, and a number that no other sequence ever has: each of a request's `n` choices is a sequence of its own,
# and an aborted request may come again under its id while a slice of its former sequence is still under way.
SequenceId = tuple[str, int]


class EndName(NamedTuple):
    """Of the logits after a prompt's last token, where they are kept."""

    number: int
    # Of all that they depend on.
    end_hash: bytes


@dataclass(frozen=True, slots=True)
class NewSequence:
    """The runner remembers it until it ends: its tokens (it sampled them), its pages, how it is sampled."""

    sequence_id: SequenceId
    request: EngineRequest
    choice: int
    # For each media item of the request: the name of its embeddings.
    encoder_keys: tuple[str, ...]


class Slice(NamedTuple):
    """Positions [start, start + length) of one sequence, to be computed."""

    sequence_id: SequenceId
    start: int
    length: int
    # Pages that the runner's table of this sequence holds from here on: table[first_block:] = new_block_ids.  A
    # sequence that lost its pages begins again at 0.
    first_block: int
    new_block_ids: tuple[int, ...]
    # Whether a token is drawn from the logits of its last position.
    samples: bool
    # What these logits are kept as, for others who have the same prompt.
    keep_as: EndName | None = None
    # Whether it is told how likely the model found each token of the prompt: all of its logits are needed.
    tells_prompt: bool = False
    # The one token that is computed, though nobody has said it yet.  Guesses follow each other, and their sequence's
    # slice of what was said last; from the logits of a right one the next token is drawn, a wrong one and what follows
    # it is void.
    guess: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


class PageCopy(NamedTuple):
    """A page that begins as another does: what of it is not alike is computed, and overwritten."""

    source: int
    target: int


class PageFill(NamedTuple):
    """A page whose content was loaded: of a stretch that the runner holds, by its hash, the page at that place."""

    block_id: int
    stretch: bytes
    place: int


class KeptStretch(NamedTuple):
    """Pages that follow each other and are computed, to be kept as one where they outlive this memory."""

    stretch: bytes
    block_ids: tuple[int, ...]
    # Of the last of some, all stretches that it follows, the first first: without them it would not be found.
    behind: tuple[bytes, ...] = ()


class Recall(NamedTuple):
    """A sequence whose first token is drawn from logits that are kept."""

    sequence_id: SequenceId
    kept_as: EndName


class Encoding(NamedTuple):
    """One media item whose pixels the runner has, to become embeddings."""

    encoder_key: str
    media_hash: str
    num_tokens: int
    modality: Modality = "image"
    # That which changes what becomes of it.
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Carried out in the order of its fields."""

    # Sequences that ended, embeddings and logits that were evicted, pixels and loaded embeddings that nobody waits for.
    ended: Sequence[SequenceId] = ()
    evicted: Sequence[str] = ()
    evicted_ends: Sequence[EndName] = ()
    unneeded_pixels: Sequence[str] = ()
    unneeded_embeddings: Sequence[str] = ()
    # Before any of their pages are written to; and of what was loaded, what is used: the rest is dropped.
    keep: Sequence[KeptStretch] = ()
    fill: Sequence[PageFill] = ()
    # Of what was to be encoded, what nobody wants just now: if it has not begun it is left out, and told to be.
    unwanted: Sequence[str] = ()
    new: Sequence[NewSequence] = ()
    # Encoder keys whose embeddings were loaded and have room from now on; reported as encoded.
    place: Sequence[str] = ()
    encode: Sequence[Encoding] = ()
    # One after the other: what was copied may be given to a sequence of the same step, and be another's target.
    copy: Sequence[PageCopy] = ()
    recall: Sequence[Recall] = ()
    beside: Sequence[Slice] = ()
    now: Sequence[Slice] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing to compute and nothing to begin."""
        return not (self.now or self.beside or self.encode or self.recall)


class SampledToken(NamedTuple):
    token_id: int
    # When they were asked for.
    logprobs: TokenLogprobs | None = None
    # When they were asked for, and it is the first: of all tokens of the prompt but its first.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    # When it was asked for: the hidden state that it was drawn from.
    vector: bytes | None = None


class Computed(NamedTuple):
    """One slice that is done, up to position `end`, and the right guesses behind it.

    A token if it was to sample one, and one more for each of those.
    """

    sequence_id: SequenceId
    end: int
    tokens: Sequence[SampledToken] = ()


class EncodeTime(NamedTuple):
    """When one media item was encoded, by the machine's monotonic clock; so many were in the same time."""

    began: float
    ended: float
    num_together: int = 1

    @property
    def seconds(self) -> float:
        """Its part of it."""
        return (self.ended - self.began) / self.num_together


class Fault(NamedTuple):
    """Why a sequence fails."""

    message: str
    # What in its own request is at fault; None: nothing, it is ours.
    field: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    # Of this step's `now`, and of any `beside` that has finished since the last step; every slice of `now` is told of
    # here or in `failed_sequences`.
    computed: Sequence[Computed] = ()
    # Encoder keys whose embeddings are held from now on.
    encoded: Sequence[str] = ()
    # What went wrong, by encoder key and by sequence: those who use it fail, no other.
    failed_encodings: Mapping[str, str] = field(default_factory=dict)
    failed_sequences: Mapping[SequenceId, Fault] = field(default_factory=dict)
    # Of those that were placed nothing.
    encode_times: Mapping[str, EncodeTime] = field(default_factory=dict)
    # The first tokens of this step's `recall`, but of what failed.
    recalled: Mapping[SequenceId, SampledToken] = field(default_factory=dict)
    # Logits that are kept from now on.
    kept_ends: Sequence[EndName] = ()
    # Encoder keys of what was not begun, as nobody wanted it when it had its turn.
    left_out: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing was computed, and nothing that runs beside has finished."""
        has_answers = self.computed or self.recalled or self.failed_sequences
        return not (has_answers or self.encoded or self.failed_encodings or self.left_out)
