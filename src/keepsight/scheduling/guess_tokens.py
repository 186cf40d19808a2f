"""What an answer may say next: what followed when its last tokens stood in its prompt, or in itself, before.

A guess costs a step next to nothing while that is mostly reading weights, and a token that was guessed rightly costs no
step of its own.  Each token is drawn as ever, after those before it; the first that is another than was guessed ends
what is used of the guesses.  So they may be wrong, but never change an answer.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from keepsight.media import MediaItem
from keepsight.scheduling.block_hash import BYTES_PER_TOKEN

# What has to be alike: two tokens are so by chance in any longer text.
NUM_ALIKE = 3


@dataclass(slots=True)
class Guesser:
    """Of one sequence."""

    # Of its last guesses.  The more were right, the more are made: texts are repeated by the sentence.
    num_right: int = 1
    num_made: int = 0

    @property
    def num_wanted(self) -> int:
        return 2 * self.num_right + 1

    def note_drawn(self, num_tokens: int) -> None:
        """By a step with what was guessed last: one token, and one more for each right guess."""
        if self.num_made:
            self.num_right, self.num_made = num_tokens - 1, 0


def guess_next(
    tokens: "array[int]", media: Sequence[MediaItem], end_ids: frozenset[int], max_tokens: int
) -> Sequence[int]:
    """What stood behind the last place where `tokens` were as they end, as far as it may be said and be followed."""
    first = _find_alike(tokens)
    if first is None:
        return ()
    # What stands for media is never said.
    starts = (item.span.start - first for item in media if item.span.end > first)
    most = max(0, min((max_tokens, *starts)))
    # Where that is their own end it goes on as it goes round.
    guesses = (tokens[first : first + most] * most)[:most]
    ends = (number for number, token_id in enumerate(guesses) if token_id in end_ids)
    return guesses[: next(ends, most)]


def _find_alike(tokens: "array[int]") -> int | None:
    """The place behind."""
    text = tokens.tobytes()
    last = len(text) - NUM_ALIKE * BYTES_PER_TOKEN
    sought, found = text[last:], last
    while found > 0:
        # One that ends before the end.
        found = text.rfind(sought, 0, found + len(sought) - 1)
        if found >= 0 and found % BYTES_PER_TOKEN == 0:
            return found // BYTES_PER_TOKEN + NUM_ALIKE
    return None
