"""What the scheduler tells the runner of a step, and what the runner reports back: plain values.

A step has two lanes. Slices in `now` are computed at once, as one batch, and the step ends with them. Work in
`beside` and `encode` is started, runs beside this step and the next ones, and is reported by the step that finds it
finished. A sequence has at most one slice under way, apart from guesses behind it, so no lane waits for the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keepsight.media import Modality
from keepsight.requests import Adapter, EngineRequest, TokenLogprobs

# Request id and a number unique to the sequence: each of a request's `n` choices is a sequence of its own, and an
# aborted request may come again under its id while a slice of its former sequence is still under way.
SequenceId = tuple[str, int]


class EndName(NamedTuple):
    """The name of the kept logits after a prompt's last token."""

    number: int
    # The hash of everything that they depend on.
    end_hash: bytes


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A new sequence. Until it ends, the runner keeps its tokens (which it samples), pages and sampling state."""

    sequence_id: SequenceId
    request: EngineRequest
    choice: int
    # The name of the embeddings of each media item of the request.
    encoder_keys: tuple[str, ...]


class KeptState(NamedTuple):
    """Where the state after positions before `end` is kept, for sequences that begin there."""

    end: int
    slot: int


class Slice(NamedTuple):
    """Positions [start, start + length) of one sequence, to compute."""

    sequence_id: SequenceId
    start: int
    length: int
    # Changes the runner's block table of this sequence: table[first_block:] = new_block_ids. A sequence that lost its
    # pages begins again at 0.
    first_block: int
    new_block_ids: tuple[int, ...]
    # True if a token is drawn from the logits of its last position.
    samples: bool
    # Where the model's recurrent layers read the state after the positions before `start`, and write the one after its
    # end; None if it has no such layers. At `start` 0 the slot's content is ignored.
    state_slot: int | None = None
    # The name under which to keep these logits, for other requests with the same prompt.
    keep_as: EndName | None = None
    # True if the prompt's log-probabilities are reported, which needs the logits of all positions.
    wants_prompt_logprobs: bool = False
    # Ends within the slice, or its own, after which the state is written to another slot as well.
    kept_states: tuple[KeptState, ...] = ()
    # The slice's one token, if it is a guess. Guesses follow each other and the slice of their sequence's last token;
    # from the logits of a right guess the next token is drawn, a wrong guess and those behind it are void.
    guess: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


class PageCopy(NamedTuple):
    """A page to copy because another begins alike; the positions that differ are then computed and overwritten."""

    source: int
    target: int


class StateCopy(NamedTuple):
    """A recurrent state to copy from one slot to another: what a model's recurrent layers know of some prefix."""

    source: int
    target: int


class PageFill(NamedTuple):
    """A page to fill with loaded content: the page at index `place` of a stretch that the runner holds."""

    block_id: int
    stretch: bytes
    place: int


class KeptStretch(NamedTuple):
    """Consecutive computed pages, to be kept as one entry of a tier."""

    stretch: bytes
    block_ids: tuple[int, ...]
    # Set for the last of several: all stretches before it, in order, without which it could not be found.
    behind: tuple[bytes, ...] = ()


class Recall(NamedTuple):
    """A sequence whose first token is drawn from kept logits."""

    sequence_id: SequenceId
    kept_as: EndName


class Encoding(NamedTuple):
    """A media item to encode, whose pixels the runner has."""

    encoder_key: str
    media_hash: str
    num_tokens: int
    modality: Modality = "image"
    # The adapter, if it changes the embeddings.
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the runner does in one step, in the order of the fields."""

    # Sequences that ended, evicted embeddings and logits, pixels and loaded embeddings that are not needed any more.
    ended: Sequence[SequenceId] = ()
    evicted: Sequence[str] = ()
    evicted_ends: Sequence[EndName] = ()
    unneeded_pixels: Sequence[str] = ()
    unneeded_embeddings: Sequence[str] = ()
    # Stretches to keep, before any of their pages are written to.
    keep: Sequence[KeptStretch] = ()
    # Pages to fill from loaded stretches; whatever else of the stretches was loaded is then dropped.
    fill: Sequence[PageFill] = ()
    # Encoder keys that are not wanted just now: encodings that have not begun are left out and reported as such.
    unwanted: Sequence[str] = ()
    new: Sequence[NewSequence] = ()
    # Encoder keys whose loaded embeddings now have room in the encoder cache; reported as encoded.
    place: Sequence[str] = ()
    encode: Sequence[Encoding] = ()
    # Both done one after the other: the source of one copy may be the target of another in the same step.
    copy: Sequence[PageCopy] = ()
    copy_states: Sequence[StateCopy] = ()
    recall: Sequence[Recall] = ()
    beside: Sequence[Slice] = ()
    now: Sequence[Slice] = ()

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute and nothing to start."""
        return not (self.now or self.beside or self.encode or self.recall)


class SampledToken(NamedTuple):
    token_id: int
    # Set if requested.
    logprobs: TokenLogprobs | None = None
    # Set on the first token if requested: of all tokens of the prompt but its first.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    # Set if requested: the hidden state from which the token was drawn.
    vector: bytes | None = None


class Computed(NamedTuple):
    """A slice computed up to position `end`, with the right guesses behind it.

    Has one token if the slice samples, and one more for each right guess.
    """

    sequence_id: SequenceId
    end: int
    tokens: Sequence[SampledToken] = ()


class EncodeTime(NamedTuple):
    """When a media item was encoded, by the machine's monotonic clock, and how many were encoded together."""

    began: float
    ended: float
    num_together: int = 1

    @property
    def seconds(self) -> float:
        """The item's share of the time."""
        return (self.ended - self.began) / self.num_together


class Fault(NamedTuple):
    """The reason why a sequence fails."""

    message: str
    # The field of the request that is at fault; None if the fault is the server's.
    field: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    # Slices of this step's `now`, and of any `beside` that finished since the last step. Every slice of `now` is
    # reported here or in `failed_sequences`.
    computed: Sequence[Computed] = ()
    # Encoder keys whose embeddings are held from now on.
    encoded: Sequence[str] = ()
    # Errors by encoder key and by sequence. Only the users of the failed thing fail.
    failed_encodings: Mapping[str, str] = field(default_factory=dict)
    failed_sequences: Mapping[SequenceId, Fault] = field(default_factory=dict)
    # By encoder key; placed embeddings have none.
    encode_times: Mapping[str, EncodeTime] = field(default_factory=dict)
    # The first tokens of this step's `recall`, except for those that failed.
    recalled: Mapping[SequenceId, SampledToken] = field(default_factory=dict)
    # Logits that are kept from now on.
    kept_ends: Sequence[EndName] = ()
    # Encoder keys of encodings that were not started, as they were unwanted when their turn came.
    left_out: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        """True if nothing was computed and nothing that runs beside has finished."""
        has_answers = self.computed or self.recalled or self.failed_sequences
        return not (has_answers or self.encoded or self.failed_encodings or self.left_out)
