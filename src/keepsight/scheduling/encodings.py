"""Which media items wait to be encoded, in whose turn, and which the runner was given: plain values.

All of them have room, so each of them can be made at any time, and then the next: in whatever order, each comes to its
end.  They are given in turns.  A request's turn is at so many embeddings as were given when it came, and as many more
as it needs: what needs little goes before the rest of what came earlier and needs much.  As turns stay and what was
given only grows, no newcomer goes before a request once as much was given since it came as it needs, unless it is more
urgent.  The runner is given no more at a time than keeps it busy, or newcomers would wait for all that.  Invariant: an
encoding waits or is given, and after each plan none waits while none is given, but for a step of prompts.
"""

from collections import Counter
from collections.abc import Iterator

from keepsight.engine_config import SchedulerConfig
from keepsight.scheduling.request_state import EncoderTurn, Order
from keepsight.scheduling.step_plan import Encoding


class Encodings:
    def __init__(self, config: SchedulerConfig) -> None:
        self._most_at_once = config.max_num_encoder_input_tokens
        self._most_beside_largest = config.max_num_batched_tokens
        # By encoder key.
        self._waiting: dict[str, Encoding] = {}
        self._given: dict[str, Encoding] = {}
        self._turns: dict[str, EncoderTurn] = {}
        # Of all that was ever given.
        self._num_tokens_given = 0
        self._num_by_media: Counter[str] = Counter()

    @property
    def are_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def are_given(self) -> bool:
        """Whether some that were begun have not ended."""
        return bool(self._given)

    def __contains__(self, encoder_key: str) -> bool:
        return encoder_key in self._turns

    def waits(self, encoder_key: str) -> bool:
        return encoder_key in self._waiting

    def need_pixels(self, media_hash: str) -> bool:
        return media_hash in self._num_by_media

    def turn_of(self, order: Order, num_tokens: int) -> EncoderTurn:
        """Of one that comes now and needs so many embeddings made."""
        priority, number = order
        return priority, self._num_tokens_given + num_tokens, number

    def add(self, encoding: Encoding, turn: EncoderTurn) -> None:
        assert encoding.encoder_key not in self, encoding.encoder_key
        self._num_by_media[encoding.media_hash] += 1
        self._waiting[encoding.encoder_key], self._turns[encoding.encoder_key] = encoding, turn

    def lend(self, encoder_key: str, turn: EncoderTurn) -> None:
        """Another wants it too: it is made in the earlier turn of both."""
        self._turns[encoder_key] = min(self._turns[encoder_key], turn)

    def take(self) -> list[Encoding]:
        """What the runner is given now."""
        taken: list[Encoding] = []
        for key in sorted(self._waiting, key=self._turns.__getitem__):
            encoding = self._waiting[key]
            if not self._fits(encoding):
                break
            self._given[key] = self._waiting.pop(key)
            self._num_tokens_given += encoding.num_tokens
            taken.append(encoding)
        return taken

    def _fits(self, encoding: Encoding) -> bool:
        """Beside the largest as much as a step computes: who comes next does not wait for more."""
        lengths = [encoding.num_tokens, *(each.num_tokens for each in self._given.values())]
        num_tokens = sum(lengths)
        fits = num_tokens <= self._most_at_once and num_tokens - max(lengths) <= self._most_beside_largest
        return fits or not self._given

    def take_back(self, encoder_key: str) -> None:
        """The runner has left it out; its turn stays the one that it had."""
        self._waiting[encoder_key] = self._given.pop(encoder_key)

    def end(self, encoder_key: str) -> Encoding:
        """It was made, or it will not be."""
        encoding = (self._waiting if encoder_key in self._waiting else self._given).pop(encoder_key)
        del self._turns[encoder_key]
        self._num_by_media[encoding.media_hash] -= 1
        if not self._num_by_media[encoding.media_hash]:
            del self._num_by_media[encoding.media_hash]
        return encoding

    def given(self) -> Iterator[Encoding]:
        return iter(self._given.values())

    def waiting(self) -> Iterator[str]:
        """Their encoder keys."""
        return iter(self._waiting)

    def check_invariants(self) -> None:
        assert not self._waiting.keys() & self._given.keys()
        assert self._turns.keys() == self._waiting.keys() | self._given.keys()
        every = [*self._waiting.values(), *self._given.values()]
        assert self._num_by_media == Counter(each.media_hash for each in every)
        assert len(self._given) <= 1 or sum(each.num_tokens for each in self._given.values()) <= self._most_at_once
