"""Banned runs of tokens (`bad_words`): tells which tokens would complete one now.

Invariant: `tokens_after` looks at no more of the output than the longest run has tokens.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence


class RunBan:
    def __init__(self, runs: Iterable[tuple[int, ...]]) -> None:
        self._last_after: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for *before, last in runs:
            self._last_after[tuple(before)].add(last)
        self._lengths = sorted({len(before) for before in self._last_after})

    def __bool__(self) -> bool:
        return bool(self._last_after)

    @property
    def num_examined_tokens(self) -> int:
        return max(self._lengths, default=0)

    def tokens_after(self, output: Sequence[int]) -> set[int]:
        ends = (tuple(output[len(output) - length :]) for length in self._lengths if length <= len(output))
        return {token_id for end in ends for token_id in self._last_after.get(end, ())}
