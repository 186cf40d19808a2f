"""The scheduler's view of one sequence: how far it is computed, what it holds, what it waits for.

"Prefill" and "decode" are not states: both follow from `num_computed` and `num_tokens`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from keepsight.media import MediaItem
from keepsight.requests import EngineRequest, FinishReason, TokenOutput
from keepsight.scheduling.block_hash import BlockHasher
from keepsight.scheduling.guess_tokens import Guesser
from keepsight.scheduling.step_plan import SampledToken, SequenceId


class Status(Enum):
    # In line for a seat.
    WAITING = "waiting"
    # Out of the line until what it waits for has come; takes no seat and blocks no other sequence.
    PARKED = "parked"
    # Has a seat; every step considers it.
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS = {
    Status.WAITING: {Status.RUNNING, Status.PARKED, Status.FINISHED},
    Status.PARKED: {Status.WAITING, Status.FINISHED},
    Status.RUNNING: {Status.WAITING, Status.PARKED, Status.FINISHED},  # preempted; short of media; done
    Status.FINISHED: set(),
}


class ParkedFor(Enum):
    # Pixels from the frontend.
    PIXELS = "pixels"
    # Embeddings from a tier, or the answer that no tier has them.
    TIERS = "tiers"
    # Keys and values from a tier, or the answer that no tier has them.
    STRETCHES = "stretches"
    # Embeddings that are being encoded, or for which there is no room or budget to begin.
    ENCODER = "encoder"
    # Its next blocks, which another sequence is computing right now.
    PREFIX = "prefix"
    # The lane beside the streams, which another prompt occupies.
    LANE = "lane"
    # The compilation of the grammar that its answer keeps to.
    GRAMMAR = "grammar"


FOR_MEDIA = (ParkedFor.PIXELS, ParkedFor.TIERS, ParkedFor.ENCODER)
# Where embeddings came from: already held or being encoded; loaded from a tier; encoded for this sequence.
Origin = Literal["device", "tier", "made"]


class LoadedTokens:
    """Prompt tokens that came from a tier for all who waited for them; the first that begins counts them as loaded."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def take(self) -> int:
        taken, self._num_tokens = self._num_tokens, 0
        return taken


class Begun(NamedTuple):
    """A request that has its first token, or for whose later tokens more media were looked up."""

    request: EngineRequest
    # By item index. Missing items were found whole in the prefix cache.
    origins: Mapping[int, Origin]
    # Those that no earlier report had.
    new_items: tuple[int, ...]
    encoder_keys: tuple[str, ...]
    # Whether there was an earlier report, with its first token.
    was_reported: bool = False

    @property
    def is_news(self) -> bool:
        """True unless all that happened since an earlier report is that embeddings were at hand."""
        return not self.was_reported or any(self.origins[index] != "device" for index in self.new_items)


# The order in which resources are granted; they are taken back in reverse.
Order = tuple[int, int]  # priority, number of the sequence
# The order of encodings (`Encodings`): priority, the count of embeddings by which it is due, number of the sequence.
EncoderTurn = tuple[int, int, int]


class Grammar(Protocol):
    """What compiles the grammar that an answer keeps to."""

    def done(self) -> bool: ...


@dataclass(slots=True, eq=False)
class RequestState:
    """One choice of one request."""

    request: EngineRequest
    choice: int
    sequence_id: SequenceId
    order: Order
    max_length: int
    end_ids: frozenset[int]
    hasher: BlockHasher
    encoder_keys: tuple[str, ...]
    # For each item, the number of its picture; a picture and its crops have the same.
    pictures: tuple[int, ...]
    num_tokens: int
    guesser: Guesser
    # Of its answer. Held until the sequence ends, as it is kept compiled while it is held.
    grammar: Grammar | None
    status: Status = Status.WAITING
    parked_for: ParkedFor | None = None
    num_computed: int = 0
    num_sampled: int = 0
    # The number of sampled tokens that had been guessed right.
    num_guessed: int = 0
    # The number of prompt tokens found in the prefix cache when the sequence began.
    num_cached_tokens: int = 0
    # Prompt tokens loaded for it, and for others that waited for the same ones.
    loaded: LoadedTokens | None = None
    num_preemptions: int = 0
    # How far it was computed when it last gave up its pages because it waited for media.
    gave_way_at: int = 0
    # The length left to compute when it was last considered, if it lacked only room in a step to join; else 0.
    num_to_join: int = 0
    # The length left to compute when it began with what it found; 0 until then.
    length_begun: int = 0
    # The first media item whose span is not wholly computed.
    next_item: int = 0
    # Set once something has to be made for it.
    encoder_turn: EncoderTurn | None = None
    # The slot of its state, once seated, and where that is to be kept; none if the model has no recurrent layers.
    state_slot: int | None = None
    milestones: tuple[int, ...] = ()
    # Indices of the items whose embeddings this sequence uses.
    claimed_items: set[int] = field(default_factory=set)
    # For each item ever claimed, what the first claim found, or "made" if it was ever encoded for this sequence.
    origins: dict[int, Origin] = field(default_factory=dict)
    # The number of leading entries of `origins` that were reported.
    num_reported_origins: int = 0
    is_under_way: bool = False
    is_known_to_runner: bool = False

    @property
    def media(self) -> tuple[MediaItem, ...]:
        return self.request.media

    @property
    def is_stream(self) -> bool:
        """True if it gets one token a step from here on: a client may be reading along."""
        return self.num_sampled > 0 and self.num_computed == self.num_tokens - 1

    @property
    def is_first_choice(self) -> bool:
        """True for the choice by which the request is reported and counted: the others find what this one made."""
        return self.choice == 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if it must report the log-probabilities of its prompt's tokens, which no cache holds."""
        is_first = self.is_first_choice and not self.num_sampled
        return is_first and self.request.sampling_params.prompt_logprobs is not None

    def take_begun(self) -> Begun | None:
        """Return a report with the first token, and again if more was claimed since (after recall or preemption)."""
        is_first = self.num_sampled == 1
        if not self.is_first_choice or not (is_first or self.num_reported_origins < len(self.origins)):
            return None
        new_items = tuple(self.origins)[self.num_reported_origins :]
        self.num_reported_origins = len(self.origins)
        return Begun(self.request, self.origins, new_items, self.encoder_keys, was_reported=not is_first)

    def change_to(self, status: Status, parked_for: ParkedFor | None = None) -> None:
        assert status in TRANSITIONS[self.status], f"{self.sequence_id}: {self.status} -> {status}"
        assert (status is Status.PARKED) == (parked_for is not None), (status, parked_for)
        self.status, self.parked_for = status, parked_for

    @property
    def awaits_grammar(self) -> bool:
        return self.grammar is not None and not self.grammar.done()

    def first_item_after(self, num_computed: int) -> int:
        """Return the first media item that reaches beyond position `num_computed`, which is no less than now."""
        media, index = self.request.media, self.next_item
        while index < len(media) and media[index].span.end <= num_computed:
            index += 1
        return index

    def milestones_between(self, start: int, end: int) -> list[int]:
        """Return the milestones in (start, end]."""
        return [milestone for milestone in self.milestones if start < milestone <= end]

    def advance(self, num_computed: int) -> None:
        self.num_computed, self.next_item = num_computed, self.first_item_after(num_computed)

    def begin_again(self) -> None:
        self.num_computed = self.next_item = self.length_begun = 0
        self.num_preemptions += 1

    def give_way(self) -> None:
        """Give up the computed positions; always further on than the last time, so it cannot be starved."""
        assert self.num_computed > self.gave_way_at, (self.num_computed, self.gave_way_at)
        self.gave_way_at = self.num_computed
        self.begin_again()

    def append(self, token: SampledToken) -> TokenOutput:
        """Append a sampled token. Return the output for the client."""
        token_id, logprobs, prompt_logprobs, vector = token
        self.hasher.extend((token_id,))
        self.num_tokens += 1
        self.num_sampled += 1
        reason = self._why_finished(token_id)
        return TokenOutput(
            self.request.request_id,
            self.choice,
            token_id,
            logprobs,
            reason,
            self.num_cached_tokens,
            prompt_logprobs,
            vector,
            self.num_guessed,
        )

    def guess(self, max_tokens: int) -> Sequence[int]:
        """Guess tokens to follow its last one, none of them the last of the answer."""
        most = min(max_tokens, self.max_length - self.num_tokens - 1)
        return self.guesser.guess(self.hasher.tokens, self.media, self.end_ids, most)

    def _why_finished(self, token_id: int) -> FinishReason | None:
        if token_id in self.end_ids:
            return "stop"
        return "length" if self.num_tokens >= self.max_length else None
