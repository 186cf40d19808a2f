"""The plan of a step under construction: its two lanes, and what is left of their budgets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from keepsight.engine_config import SchedulerConfig, least_batched_tokens
from keepsight.scheduling.kv_cache_manager import KvCacheManager
from keepsight.scheduling.lineup import Lineup
from keepsight.scheduling.request_state import RequestState
from keepsight.scheduling.step_plan import EndName, NewSequence, PageCopy, Recall, SequenceId, Slice

# A crowd is at least this many waiting prompts, and more than half as many as there are streams. In a crowd all may
# join, with this many tokens a step, and the streams wait for them: beside the streams they would have only half of the
# machine, one after the other.
LEAST_CROWD, CROWD_TOKENS = 3, 512

# The part of a step that a prompt too long for one step leaves to other prompts: short ones do not wait for its end.
PART_LEFT_BY_LONG = 0.5


def tokens_left_by_long(config: SchedulerConfig) -> int:
    """Return how many tokens of a step a long prompt leaves to others.

    Never tokens needed to compute a picture whole; none if encodings and steps take turns, as nobody reads along then.
    """
    if config.takes_turns:
        return 0
    most = config.max_num_batched_tokens - least_batched_tokens(config.tokens_at_once, config.max_num_seqs)
    return min(int(config.max_num_batched_tokens * PART_LEFT_BY_LONG), most)


class Room(NamedTuple):
    """Limits for prompts that join running streams: the tokens of all together, and the length left of each."""

    # None: nothing streams, or all prompts may join.
    num_tokens: int | None
    longest: int
    is_for_all: bool = True
    # In a crowd, the tokens reserved for prompts that are short enough to join without one.
    num_for_short: int = 0
    longest_short: int = 0
    # In a crowd, the most that a prompt too long for one step leaves to others.
    most_left: int | None = None


def room_to_join(config: SchedulerConfig, num_streams: int, lineup: Lineup) -> Room:
    usual = config.max_prompt_tokens_beside_streams
    if not num_streams or usual is None:
        return Room(None, 0)
    # Not where streams pause for encodings: a sequence parked in an empty step could end the crowd unnoticed.
    may_crowd = usual and not config.takes_turns
    if may_crowd and lineup.num_kept_waiting >= max(LEAST_CROWD, num_streams // 2 + 1):
        num_tokens = max(usual, CROWD_TOKENS, config.tokens_at_once)
        # What is left must suffice for a picture computed whole, and long prompts must make progress, too.
        most = num_tokens - max(config.tokens_at_once, num_tokens // 2)
        return Room(
            num_tokens, config.max_model_len, num_for_short=min(usual, most), longest_short=usual, most_left=most
        )
    return Room(usual, usual, is_for_all=False)


class Cut(NamedTuple):
    """How far to compute a prompt next: up to `end`, in the lane `now` (if it joins) or `beside`."""

    end: int
    joins: bool
    # True if `end` would be farther if the step had more room.
    lacks_room: bool


@dataclass(slots=True)
class StepDraft:
    config: SchedulerConfig
    lineup: Lineup
    # The tokens left in `now` for prompts; those of streams are already subtracted.
    now_tokens_left: int
    # Limits for prompts that join running streams.
    room: Room
    beside_tokens_left: int
    # True if nothing is computed: as many sequences as a step would reach only ask for the media that they lack.
    is_for_encodings: bool
    # The number of preemptions before it was begun.
    num_preemptions: int
    copy: list[PageCopy] = field(default_factory=list)
    recall: list[Recall] = field(default_factory=list)
    now: list[Slice] = field(default_factory=list)
    beside: list[Slice] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    joining_tokens_left: int | None = field(init=False)
    # The most tokens of either lane that a prompt too long for one step leaves to others, until they are considered.
    left_by_long: int = field(init=False)
    # The long prompts that get nothing until then.
    _held_back: list[RequestState] = field(default_factory=list)
    # The lanes, by `joins`, in which a sequence waits for more room.
    _lanes_waited_for: set[bool] = field(default_factory=set)
    _num_joining: int = 0

    def __post_init__(self) -> None:
        self.joining_tokens_left = self.room.num_tokens
        self.left_by_long = tokens_left_by_long(self.config)
        if self.room.most_left is not None:
            self.left_by_long = min(self.left_by_long, self.room.most_left)

    @property
    def computes_nothing(self) -> bool:
        return not (self.now or self.beside or self.recall)

    def joins(self, length: int) -> bool:
        """Return whether a prompt with this length left to compute belongs in `now`."""
        return self.joining_tokens_left is None or length <= self.room.longest

    def tokens_left(self, state: RequestState, length: int, *, joins: bool) -> int:
        """Return how many tokens the lane has for a prompt with this length left to compute."""
        num_kept = self._tokens_for_others(state) if self._is_long(state, length) else 0
        left = max(0, (self.now_tokens_left if joins else self.beside_tokens_left) - num_kept)
        if not joins or self.joining_tokens_left is None:
            return left
        if length > self.room.longest_short:
            num_kept = max(num_kept, self.room.num_for_short)
        return max(0, min(left, self.joining_tokens_left - num_kept))

    def _tokens_for_others(self, state: RequestState) -> int:
        """Return how many tokens a long prompt leaves to others: what they may need, as what is cached is not known."""
        if not self.left_by_long or self._held_back:
            return self.left_by_long
        planned = {piece.sequence_id for piece in (*self.now, *self.beside)}
        has_seats = len(self.lineup.running) < self.config.max_num_seqs
        others = self.lineup.running + (self.lineup.waiting if has_seats else [])
        # All that a stream needs is subtracted already.
        needed = (
            other.num_tokens - other.num_computed
            for other in others
            if other is not state and not (other.is_stream or other.is_under_way or other.sequence_id in planned)
        )
        return min(self.left_by_long, sum(needed))

    def _is_long(self, state: RequestState, length: int) -> bool:
        """Return whether it is too long for one step, or was when it began: where several end, questions still fit."""
        return max(length, state.length_begun) > self.config.max_num_batched_tokens

    def has_prompts(self, *, joins: bool) -> bool:
        return bool(self._num_joining if joins else self.beside)

    def holds_back(self, state: RequestState, cut: Cut, start: int) -> bool:
        """Return whether a long prompt gets nothing before others have been considered; if so, note it."""
        if cut.end > start or not self.left_by_long or not self._is_long(state, state.num_tokens - start):
            return False
        self._held_back.append(state)
        return True

    def end_reservation(self) -> list[RequestState]:
        """Leave nothing to others any more. Return the long prompts that were held back."""
        self.left_by_long, self.room = 0, self.room._replace(num_for_short=0)
        return self._held_back

    def waits_for_room(self, cut: Cut, start: int, end_of_prompt: int, block_size: int) -> bool:
        """Return whether a waiting prompt should wait because the step has too little room left for it to begin.

        Prompts behind it that fit whole may still be planned. A piece of less than a block would announce none, so
        all prompts with the same beginning would start like that and each compute all of it. One that is short for
        another reason, such as a picture that is not ready, would be as short in any step.
        """
        if cut.end == end_of_prompt:
            return False
        is_scrap = cut.lacks_room and cut.end - start < block_size and self.has_prompts(joins=cut.joins)
        if cut.end == start or is_scrap:
            self._lanes_waited_for.add(cut.joins)
        return cut.joins in self._lanes_waited_for

    def has_no_room_to_join(self, state: RequestState) -> bool:
        """Return whether another prompt waits to join, and this one can only wait behind it."""
        length = state.num_to_join
        is_behind = True in self._lanes_waited_for and self.joins(length)
        return is_behind and length > self.tokens_left(state, length, joins=True)

    def joins_sooner(self, state: RequestState, start: int) -> bool:
        """Return whether to join the streams now from `start`, not wait for a prefix that another sequence computes.

        As the first to join, and whole: all other prompts under way are then in the lane `beside`, and may take many
        steps. With media left, waiting may spare an encoding.
        """
        length, is_text = state.num_tokens - start, state.first_item_after(start) == len(state.media)
        is_first = self.joining_tokens_left is not None and not self._num_joining
        return is_text and is_first and length <= self.tokens_left(state, length, joins=True)

    def introduce(self, state: RequestState) -> None:
        """Announce a sequence to the runner, if it does not know it yet."""
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

    def add_guesses(self, states: Mapping[SequenceId, RequestState], kv_cache: KvCacheManager) -> int:
        """Add guesses to streams, in the room that everything else leaves. Return how many."""
        room = most = min(self.now_tokens_left, self.config.guess_up_to - sum(piece.length for piece in self.now))
        for piece in tuple(self.now) if room > 0 else ():
            state = states[piece.sequence_id]
            if not state.is_stream:
                continue
            num_blocks = kv_cache.num_blocks_of(state.sequence_id)
            guesses = state.guess(min(room, num_blocks * kv_cache.block_size - piece.end))
            room -= len(guesses)
            self.now += (
                Slice(state.sequence_id, position, 1, num_blocks, (), samples=True, guess=token_id)
                for position, token_id in enumerate(guesses, piece.end)
            )
        return most - room
