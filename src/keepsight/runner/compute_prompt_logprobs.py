"""Computes the log-probabilities of a prompt's tokens, for callers who ask for them.

This takes the logits of every position, more than a step's memory holds, so they are computed a few at a time.
"""

from collections.abc import Callable

from torch import Tensor

from keepsight.runner.sample_tokens import ROWS_AT_ONCE, list_logprobs
from keepsight.runner.sequence_table import RunningSequence


def compute_prompt_logprobs(
    hidden: Tensor,  # [tokens, hidden], of a slice that begins at `start`
    sequence: RunningSequence,
    start: int,
    to_logits: Callable[[Tensor], Tensor],
    between_parts: Callable[[], None],
) -> None:
    """Append to the sequence's prompt log-probabilities; a prompt that begins again replaces what was there."""
    logprobs, num_top = sequence.prompt_logprobs, sequence.sampling.params.prompt_logprobs
    assert num_top is not None
    del logprobs[start:]
    assert len(logprobs) == start, "a part of the prompt was left out"
    # The logits of each position are for the next token, so the prompt's last position has none to report.
    next_ids = sequence.request.token_ids[start + 1 : start + 1 + len(hidden)]
    for first in range(0, len(next_ids), ROWS_AT_ONCE):
        some = next_ids[first : first + ROWS_AT_ONCE]
        logprobs += list_logprobs(to_logits(hidden[first : first + len(some)]), some, num_top)
        between_parts()
