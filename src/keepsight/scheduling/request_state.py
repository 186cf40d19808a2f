"""The scheduler's view of one sequence: how far it is computed, what it holds, what it waits for.

"Prefill" and "decode" are not states: they are what `num_computed < num_tokens` looks like.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from keepsight.media import MediaItem
from keepsight.requests import EngineRequest, FinishReason, TokenOutput
from keepsight.scheduling.block_hash import BlockHasher
from keepsight.scheduling.guess_tokens import Guesser
from keepsight.scheduling.step_plan import SampledToken, SequenceId


class Status(Enum):
    # In line for a seat.
    WAITING = "waiting"
    # Out of the line until what it waits for has come; takes no seat, holds nobody back.
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
    # Embeddings from a tier, or to learn that none has them.
    TIERS = "tiers"
    # Keys and values from where they outlive the device's memory, or to learn that none has them.
    STRETCHES = "stretches"
    # Embeddings: being encoded, or no room or budget to begin.
    ENCODER = "encoder"
    # The same blocks, which another sequence is computing right now.
    PREFIX = "prefix"
    # The lane beside the streams, taken by another prompt.
    LANE = "lane"


FOR_MEDIA = (ParkedFor.PIXELS, ParkedFor.TIERS, ParkedFor.ENCODER)
# Where embeddings came from: they were held or being made, they were loaded, they were made for this sequence.
Origin = Literal["device", "tier", "made"]


class Begun(NamedTuple):
    """A request that has its first token, or for whose later ones more had to be made."""

    request: EngineRequest
    # By item; of those that are missing the prefix cache had all.
    origins: Mapping[int, Origin]
    encoder_keys: tuple[str, ...]


# The order in which everything is granted, and the reverse of the order in which it is taken back.
Order = tuple[int, int]  # priority, number of the sequence
# Whose media are encoded first (`Encodings`): priority, embeddings made by when, number of the sequence.
EncoderTurn = tuple[int, int, int]


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
    # By item, the number of the picture that it is of, with its crops.
    pictures: tuple[int, ...]
    num_tokens: int
    guesser: Guesser
    status: Status = Status.WAITING
    parked_for: ParkedFor | None = None
    num_computed: int = 0
    num_sampled: int = 0
    # Of these, how many had been guessed.
    num_guessed: int = 0
    # Of the prompt, found in the prefix cache when the sequence began.
    num_cached_tokens: int = 0
    # Of these, at most, what was loaded for it.
    num_loaded_tokens: int = 0
    num_preemptions: int = 0
    # How far it was computed when it last gave its pages to those behind it, because it waited for media.
    gave_way_at: int = 0
    # What was left of it when it was last considered, if it lacked nothing but room in a step to join; else 0.
    num_to_join: int = 0
    # The first media item whose span is not wholly computed.
    next_item: int = 0
    # Once something has to be encoded for it.
    encoder_turn: EncoderTurn | None = None
    # Items whose embeddings this sequence is a user of.
    claimed_items: set[int] = field(default_factory=set)
    # Of items that it ever claimed, what the first claim found; or that one was made for it.
    origins: dict[int, Origin] = field(default_factory=dict)
    # So many of them were told, the first ones.
    num_told_origins: int = 0
    is_under_way: bool = False
    is_known_to_runner: bool = False

    @property
    def media(self) -> tuple[MediaItem, ...]:
        return self.request.media

    @property
    def is_stream(self) -> bool:
        """One token a step from here on: somebody reads along."""
        return self.num_sampled > 0 and self.num_computed == self.num_tokens - 1

    @property
    def is_first_choice(self) -> bool:
        """What the request itself is told of and counted by: the others find what this one made."""
        return self.choice == 0

    @property
    def tells_prompt(self) -> bool:
        """Its caller wants to know how likely each token of the prompt was: no cache knows that."""
        is_first = self.is_first_choice and not self.num_sampled
        return is_first and self.request.sampling_params.prompt_logprobs is not None

    def take_begun(self) -> Begun | None:
        """With its first token; again when more was made or loaded for it since: after a recall, or a preemption."""
        is_first = self.num_sampled == 1
        if not self.is_first_choice or not (is_first or self.num_told_origins < len(self.origins)):
            return None
        untold = list(self.origins.values())[self.num_told_origins :]
        self.num_told_origins = len(self.origins)
        if not is_first and all(origin == "device" for origin in untold):
            return None
        return Begun(self.request, self.origins, self.encoder_keys)

    def change_to(self, status: Status, parked_for: ParkedFor | None = None) -> None:
        assert status in TRANSITIONS[self.status], f"{self.sequence_id}: {self.status} -> {status}"
        assert (status is Status.PARKED) == (parked_for is not None), (status, parked_for)
        self.status, self.parked_for = status, parked_for

    def first_item_after(self, num_computed: int) -> int:
        """The first media item that positions from `num_computed` on, no fewer than now, have a part in."""
        media, index = self.request.media, self.next_item
        while index < len(media) and media[index].span.end <= num_computed:
            index += 1
        return index

    def advance(self, num_computed: int) -> None:
        self.num_computed, self.next_item = num_computed, self.first_item_after(num_computed)

    def begin_again(self) -> None:
        self.num_computed = self.next_item = 0
        self.num_preemptions += 1

    def give_way(self) -> None:
        """Each time further on, so it cannot be made to give way for ever."""
        assert self.num_computed > self.gave_way_at, (self.num_computed, self.gave_way_at)
        self.gave_way_at = self.num_computed
        self.begin_again()

    def append(self, token: SampledToken) -> TokenOutput:
        """What its caller is told."""
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
        """What it may say after its next token is drawn, none of which is its last."""
        most = min(max_tokens, self.max_length - self.num_tokens - 1)
        return self.guesser.guess(self.hasher.tokens, self.media, self.end_ids, most)

    def _why_finished(self, token_id: int) -> FinishReason | None:
        if token_id in self.end_ids:
            return "stop"
        return "length" if self.num_tokens >= self.max_length else None
