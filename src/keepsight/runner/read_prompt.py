"""How likely the model found each token of a prompt, for callers who want to know.

It takes the logits of every position, which is more memory than a step has: they are made a few at a time.
"""

from collections.abc import Callable

from torch import Tensor

from keepsight.runner.sample_tokens import list_logprobs
from keepsight.runner.sequence_table import RunningSequence

# Of a vocabulary of 262k these are 64 MB.
ROWS_AT_ONCE = 64


def read_prompt(
    hidden: Tensor,  # [tokens, hidden], of a slice that begins at `start`
    sequence: RunningSequence,
    start: int,
    to_logits: Callable[[Tensor], Tensor],
    between_parts: Callable[[], None],
) -> None:
    """Adds to what the sequence knows; what begins anew is told anew."""
    told, num_top = sequence.prompt_logprobs, sequence.sampling.params.prompt_logprobs
    assert num_top is not None
    del told[start:]
    assert len(told) == start, "a part of the prompt was left out"
    # Each position tells of the next token, the prompt's last of none of its own.
    next_ids = sequence.request.token_ids[start + 1 : start + 1 + len(hidden)]
    for first in range(0, len(next_ids), ROWS_AT_ONCE):
        some = next_ids[first : first + ROWS_AT_ONCE]
        told += list_logprobs(to_logits(hidden[first : first + len(some)]), some, num_top)
        between_parts()
