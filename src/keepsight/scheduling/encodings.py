"""Tracks which media items wait to be encoded, in which turn, and which were given to the runner: plain values only.

All of them have room reserved, so they can be encoded in any order and each will finish. They are given to the runner
in turns. A request's turn is the number of embeddings given before it came plus the number that it needs: a small
request goes before the rest of an earlier, large one. Turns are fixed and the number given only grows, so once as many
embeddings were given since a request came as it needs, no newcomer goes before it unless more urgent. The runner is
given only enough to keep it busy, or newcomers would wait for all of that. Invariant: an encoding either waits or is
given, and after each plan none waits while none is given, except for a step of prompts.
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
        # The total ever given to the runner.
        self._num_tokens_given = 0
        self._num_by_media: Counter[str] = Counter()

    @property
    def are_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def are_given(self) -> bool:
        """True if the runner was given encodings that have not ended."""
        return bool(self._given)

    def __contains__(self, encoder_key: str) -> bool:
        return encoder_key in self._turns

    def waits(self, encoder_key: str) -> bool:
        return encoder_key in self._waiting

    def need_pixels(self, media_hash: str) -> bool:
        return media_hash in self._num_by_media

    def turn_of(self, order: Order, num_tokens: int) -> EncoderTurn:
        """Return the turn of a request that comes now and needs `num_tokens` embeddings encoded."""
        priority, number = order
        return priority, self._num_tokens_given + num_tokens, number

    def add(self, encoding: Encoding, turn: EncoderTurn) -> None:
        assert encoding.encoder_key not in self, encoding.encoder_key
        self._num_by_media[encoding.media_hash] += 1
        self._waiting[encoding.encoder_key], self._turns[encoding.encoder_key] = encoding, turn

    def move_up(self, encoder_key: str, turn: EncoderTurn) -> None:
        """Note that another sequence wants the encoding, too: it goes in the earlier of the two turns."""
        self._turns[encoder_key] = min(self._turns[encoder_key], turn)

    def take(self) -> list[Encoding]:
        """Return the encodings to give to the runner now."""
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
        """Return whether the encoding fits with those given: apart from the largest, at most a step's tokens.

        A newcomer never waits for more than that.
        """
        lengths = [encoding.num_tokens, *(each.num_tokens for each in self._given.values())]
        num_tokens = sum(lengths)
        fits = num_tokens <= self._most_at_once and num_tokens - max(lengths) <= self._most_beside_largest
        return fits or not self._given

    def take_back(self, encoder_key: str) -> None:
        """Let an encoding that the runner left out wait again, in its former turn."""
        self._waiting[encoder_key] = self._given.pop(encoder_key)

    def end(self, encoder_key: str) -> Encoding:
        """Remove an encoding that has finished, failed or been given up."""
        encoding = (self._waiting if encoder_key in self._waiting else self._given).pop(encoder_key)
        del self._turns[encoder_key]
        self._num_by_media[encoding.media_hash] -= 1
        if not self._num_by_media[encoding.media_hash]:
            del self._num_by_media[encoding.media_hash]
        return encoding

    def given(self) -> Iterator[Encoding]:
        return iter(self._given.values())

    def waiting(self) -> Iterator[str]:
        """Iterate over the encoder keys of waiting encodings."""
        return iter(self._waiting)

    def check_invariants(self) -> None:
        assert not self._waiting.keys() & self._given.keys()
        assert self._turns.keys() == self._waiting.keys() | self._given.keys()
        every = [*self._waiting.values(), *self._given.values()]
        assert self._num_by_media == Counter(each.media_hash for each in every)
        assert len(self._given) <= 1 or sum(each.num_tokens for each in self._given.values()) <= self._most_at_once
