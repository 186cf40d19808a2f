"""What an answer may say next: what followed when its last tokens stood in its prompt, in itself, or in what its caller
predicts, before.

A guess costs a step next to nothing while that is mostly reading weights, and a token that was guessed rightly costs no
step of its own.  Each token is drawn as ever, after those before it; the first that is another than was guessed ends
what is used of the guesses.  So they may be wrong, but never change an answer.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from keepsight.media import MediaItem
from keepsight.requests import EngineRequest
from keepsight.scheduling.block_hash import BYTES_PER_TOKEN

# What has to be alike: two tokens are so by chance in any longer text.
NUM_ALIKE = 3


@dataclass(slots=True)
class Guesser:
    """Of one sequence."""

    # What is looked at before its text; shared by a request's choices.
    before: "array[int]"
    # So far before its end lies what it repeats.
    distance: int | None = None
    # Of its last guesses.  The more were right, the more are made: texts are repeated by the sentence.
    num_right: int = 1
    num_made: int = 0

    def guess(
        self, tokens: "array[int]", media: Sequence[MediaItem], end_ids: frozenset[int], max_tokens: int
    ) -> Sequence[int]:
        """What stood behind a place where `tokens` were as they end, as far as it may be said and be followed."""
        text, num_before = self.before + tokens if self.before else tokens, len(self.before)
        self.distance = _find_distance(text, self.distance)
        if self.distance is None:
            return ()
        first = len(text) - self.distance
        # What stands for media is never said, and behind what is predicted a prompt begins.
        starts = [num_before + item.span.start for item in media if num_before + item.span.end > first]
        if first <= num_before:
            starts.append(num_before)
        most = max(0, min((max_tokens, 2 * self.num_right + 1, *(start - first for start in starts))))
        # Where that is its own end it goes on as it goes round.
        guesses = (text[first : first + most] * most)[:most]
        ends = (number for number, token_id in enumerate(guesses) if token_id in end_ids)
        self.num_made = next(ends, most)
        return guesses[: self.num_made]

    def note_drawn(self, num_tokens: int) -> None:
        """By a step with what was guessed last: one token, and one more for each right guess."""
        if self.num_made:
            self.num_right, self.num_made = num_tokens - 1, 0


def make_guesser(request: EngineRequest) -> Guesser:
    """What is predicted follows the prompt's end, and as long as it is said is repeated from there."""
    if not request.predicted:
        return Guesser(array("I"))
    before = array("I", (*request.token_ids[-NUM_ALIKE:], *request.predicted))
    return Guesser(before, len(before) + max(0, len(request.token_ids) - NUM_ALIKE))


def _find_distance(tokens: "array[int]", last: int | None) -> int | None:
    """Of the last place where the tokens were alike; that of what is repeated already, as long as it goes on."""
    sought = tokens[-NUM_ALIKE:]
    if last is not None and tokens[-NUM_ALIKE - last : -last] == sought:
        return last
    text, pattern = tokens.tobytes(), sought.tobytes()
    found = len(text) - len(pattern)
    while found > 0:
        # One that ends before the end.
        found = text.rfind(pattern, 0, found + len(pattern) - 1)
        if found >= 0 and found % BYTES_PER_TOKEN == 0:
            return len(tokens) - NUM_ALIKE - found // BYTES_PER_TOKEN
    return None
