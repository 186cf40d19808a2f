"""Speculative decoding by lookup: guesses that an answer goes on as the text did where its last tokens stood before.

That text is the prompt, the answer itself, or what the caller predicts. A guess costs next to nothing as long as a
step mostly reads weights, and a token that was guessed right costs no step of its own. Tokens are drawn one after
another as without guesses; the first that differs from its guess voids the remaining guesses. So guesses may be wrong,
but never change an answer.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from keepsight.media import MediaItem
from keepsight.requests import EngineRequest
from keepsight.scheduling.block_hash import BYTES_PER_TOKEN

# The number of tokens that must match: in any longer text two match by chance.
NUM_ALIKE = 3


@dataclass(slots=True)
class Guesser:
    """Guesses the next tokens of one sequence."""

    # Text that is searched in front of the sequence's own; shared by a request's choices.
    before: "array[int]"
    # How many tokens before its end the text that it repeats lies.
    distance: int | None = None
    # Counts of the last guesses. The more were right, the more are made next: texts repeat whole sentences.
    num_right: int = 1
    num_made: int = 0

    def guess(
        self, tokens: "array[int]", media: Sequence[MediaItem], end_ids: frozenset[int], max_tokens: int
    ) -> Sequence[int]:
        """Return what followed an earlier match of the last tokens, up to media, an end id or the prediction's end."""
        text, num_before = self.before + tokens if self.before else tokens, len(self.before)
        self.distance = _find_distance(text, self.distance)
        if self.distance is None:
            return ()
        first = len(text) - self.distance
        # Media tokens are never part of an answer, and what follows the predicted text is the start of the prompt.
        starts = [num_before + item.span.start for item in media if num_before + item.span.end > first]
        if first <= num_before:
            starts.append(num_before)
        most = max(0, min((max_tokens, 2 * self.num_right + 1, *(start - first for start in starts))))
        # If the copied text reaches the end of the sequence, it goes on periodically.
        guesses = (text[first : first + most] * most)[:most]
        ends = (number for number, token_id in enumerate(guesses) if token_id in end_ids)
        self.num_made = next(ends, most)
        return guesses[: self.num_made]

    def note_drawn(self, num_tokens: int) -> None:
        """Note that a step with the last guesses drew `num_tokens`: one, and one more for each right guess."""
        if self.num_made:
            self.num_right, self.num_made = num_tokens - 1, 0


def make_guesser(request: EngineRequest) -> Guesser:
    """Make a request's guesser: predicted text counts as an earlier continuation of the prompt, copied as it fits."""
    if not request.predicted:
        return Guesser(array("I"))
    before = array("I", (*request.token_ids[-NUM_ALIKE:], *request.predicted))
    return Guesser(before, len(before) + max(0, len(request.token_ids) - NUM_ALIKE))


def _find_distance(tokens: "array[int]", last: int | None) -> int | None:
    """Return the distance to the last earlier match, or `last` as long as the text there goes on matching."""
    sought = tokens[-NUM_ALIKE:]
    if last is not None and tokens[-NUM_ALIKE - last : -last] == sought:
        return last
    text, pattern = tokens.tobytes(), sought.tobytes()
    found = len(text) - len(pattern)
    while found > 0:
        # The next match to the left.
        found = text.rfind(pattern, 0, found + len(pattern) - 1)
        if found >= 0 and found % BYTES_PER_TOKEN == 0:
            return len(tokens) - NUM_ALIKE - found // BYTES_PER_TOKEN
    return None
