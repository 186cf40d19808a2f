"""The plan of a step while it grows: its two lanes, and what is left of their budgets."""

from dataclasses import dataclass, field
from typing import NamedTuple

from keepsight.engine_config import SchedulerConfig, least_batched_tokens
from keepsight.scheduling.lineup import Lineup
from keepsight.scheduling.request_state import RequestState
from keepsight.scheduling.step_plan import EndName, NewSequence, PageCopy, Recall, SequenceId, Slice

# Where at least so many prompts wait, and more than half as many as answers stream, all join with so many tokens: who
# reads along waits for them then.  Beside they would have half of the machine, one after the other.
LEAST_CROWD, CROWD_TOKENS = 3, 512

# Of a step, what a prompt that does not fit one leaves to other prompts: no question waits for somebody's book.
PART_LEFT_BY_LONG = 0.5


def tokens_left_by_long(config: SchedulerConfig) -> int:
    """None that a picture needs which is computed whole; and none where nobody reads along."""
    if config.takes_turns:
        return 0
    most = config.max_num_batched_tokens - least_batched_tokens(config.tokens_at_once, config.max_num_seqs)
    return min(int(config.max_num_batched_tokens * PART_LEFT_BY_LONG), most)


class Room(NamedTuple):
    """For prompts that join running streams: tokens of them all, and how much may be left to compute of each."""

    # None: nobody streams, or all may join.
    num_tokens: int | None
    longest: int
    is_for_all: bool = True
    # In a crowd, of the tokens: left to those of whom no more is to be computed than joins without one.
    num_for_short: int = 0
    longest_short: int = 0


def room_to_join(config: SchedulerConfig, num_streams: int, lineup: Lineup) -> Room:
    usual = config.max_prompt_tokens_beside_streams
    if not num_streams or usual is None:
        return Room(None, 0)
    # Where streams pause for encodings, whoever is parked in an empty step could end the crowd, and nobody looks again.
    may_crowd = usual and not config.takes_turns
    if may_crowd and lineup.num_kept_waiting >= max(LEAST_CROWD, num_streams // 2 + 1):
        num_tokens = max(usual, CROWD_TOKENS, config.tokens_at_once)
        # A picture may be computed whole, and what is long must get on, too.
        num_for_short = min(usual, num_tokens - max(config.tokens_at_once, num_tokens // 2))
        return Room(num_tokens, config.max_model_len, num_for_short=num_for_short, longest_short=usual)
    return Room(usual, usual, is_for_all=False)


class Piece(NamedTuple):
    """What of a prompt is to be computed next: up to `end`, in the lane `now` (it joins) or `beside`."""

    end: int
    joins: bool


@dataclass(slots=True)
class StepDraft:
    config: SchedulerConfig
    lineup: Lineup
    # What tokens of prompts may take of `now`; streams have theirs already.
    now_tokens_left: int
    # Of these, prompts that join running streams.
    room: Room
    beside_tokens_left: int
    # Nothing is computed: of who could be, as many as a step would reach only ask for the media that they lack.
    is_for_encodings: bool
    copy: list[PageCopy] = field(default_factory=list)
    recall: list[Recall] = field(default_factory=list)
    now: list[Slice] = field(default_factory=list)
    beside: list[Slice] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    joining_tokens_left: int | None = field(init=False)
    # Of either lane, to other prompts by one that does not fit a step.
    left_by_long: int = field(init=False)
    # By `joins`: where somebody waits for more room.
    _lanes_waited_for: set[bool] = field(default_factory=set)
    _num_joining: int = 0

    def __post_init__(self) -> None:
        self.joining_tokens_left = self.room.num_tokens
        self.left_by_long = tokens_left_by_long(self.config)

    @property
    def computes_nothing(self) -> bool:
        return not (self.now or self.beside or self.recall)

    def joins(self, length: int) -> bool:
        """Whether a prompt with so much left to compute belongs into `now`."""
        return self.joining_tokens_left is None or length <= self.room.longest

    def tokens_left(self, length: int, *, joins: bool) -> int:
        """For a prompt with so much left to compute."""
        if not joins or self.joining_tokens_left is None:
            left = self.now_tokens_left if joins else self.beside_tokens_left
            num_planned = self._num_joining + len(self.beside)
            leaves_some = self._is_long(length) and self.lineup.num_prompts > 1 + num_planned
            return max(0, left - self.left_by_long) if leaves_some else left
        num_kept = self.room.num_for_short if length > self.room.longest_short else 0
        return max(0, min(self.now_tokens_left, self.joining_tokens_left - num_kept))

    def _is_long(self, length: int) -> bool:
        return length > self.config.max_num_batched_tokens

    def has_prompts(self, *, joins: bool) -> bool:
        return bool(self._num_joining if joins else self.beside)

    def waits_for_room(self, piece: Piece, start: int, end_of_prompt: int, block_size: int) -> bool:
        """What others leave of the step is too little to begin with.  Who is behind may take it, but nothing later.

        With less than a block, all who have the same beginning would begin likewise, and each compute all of it.
        """
        if piece.end == end_of_prompt:
            return False
        if piece.end == start and self.left_by_long and self._is_long(end_of_prompt - start):
            return True  # what is left is for others
        is_scrap = piece.end - start < block_size and self.has_prompts(joins=piece.joins)
        if piece.end == start or is_scrap:
            self._lanes_waited_for.add(piece.joins)
        return piece.joins in self._lanes_waited_for

    def has_no_room_to_join(self, length: int) -> bool:
        """Somebody waits to join, and with so much left to compute another can only wait behind it."""
        return True in self._lanes_waited_for and self.joins(length) and length > self.tokens_left(length, joins=True)

    def is_first_to_join(self, length: int) -> bool:
        """Streams, wholly; what others compute of prompts is then all beside, and may take many steps."""
        is_beside_streams = self.joining_tokens_left is not None
        return is_beside_streams and not self._num_joining and length <= self.tokens_left(length, joins=True)

    def introduce(self, state: RequestState) -> None:
        """To the runner, if it does not know it yet."""
        if not state.is_known_to_runner:
            state.is_known_to_runner = True
            self.new.append(NewSequence(state.sequence_id, state.request, state.choice, state.encoder_keys))

    def add_recall(self, sequence_id: SequenceId, kept_as: EndName) -> None:
        self.recall.append(Recall(sequence_id, kept_as))
        self.now_tokens_left -= 1

    def add_prompt(self, prompt: Slice, *, joins: bool) -> None:
        if not joins:
            self.beside.append(prompt)
            self.beside_tokens_left -= prompt.length
            return
        self._num_joining += 1
        self.now.append(prompt)
        self.now_tokens_left -= prompt.length
        if self.joining_tokens_left is not None:
            self.joining_tokens_left -= prompt.length
