"""Finds tokens by rank, likeliest first and equal ones by id, without sorting whole rows.

A place in that order is given by the probability mass before it. Tokens are counted in buckets by their distance from
the likeliest, and only those in the bucket of a place are sorted. Probabilities are counted in integers, whose sums do
not depend on their order or on other rows. Knows nothing of what a place is wanted for.
"""

import torch
from torch import Tensor

# With more rows, intermediate results would no longer fit a processor's caches.
MOST_ROWS = 4
# The number of shares that make up probability 1; those of all rows together stay below 2**63.
NUM_SHARES = 2.0**60
# The probability of each token in rows of NaN, where all are equal.
_UNKNOWN = 2.0**-40
# Enough for a distance of 43, from which on no token has a share.
_BUCKETS, _BUCKETS_OF_LOGIT = 2**16, 1500


class LikeliestFirst:
    """The order of tokens by `values` [rows, vocabulary]: logits, minus infinity where ruled out."""

    def __init__(self, values: Tensor) -> None:
        assert len(values) <= MOST_ROWS
        self.values = values
        self.shares = (values.softmax(dim=-1).nan_to_num_(_UNKNOWN) * NUM_SHARES).long()
        distances = values.amax(dim=-1, keepdim=True) - values
        self._buckets = distances.mul_(_BUCKETS_OF_LOGIT).nan_to_num_(0).clamp_(max=_BUCKETS - 1).long()
        self._sums = self.shares.new_zeros(len(values), _BUCKETS).scatter_add_(1, self._buckets, self.shares)
        self._ends = self._sums.cumsum(dim=-1)

    @property
    def all_shares(self) -> Tensor:
        """The total number of shares of each row [rows, 1]."""
        return self._ends[:, -1:]

    def find(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Find the tokens at `places` [rows, 1], each a number of shares in [0, all_shares).

        Return ids [rows] of the first token in each row that has, with all before it, more shares than that, and how
        many those are [rows, 1].
        """
        bucket = torch.searchsorted(self._ends, places, right=True)
        inside = self._sums.gather(1, bucket)
        rows, ids = (self._buckets == bucket).nonzero(as_tuple=True)
        order = self.values[rows, ids].sort(descending=True, stable=True).indices
        order = order[rows[order].sort(stable=True).indices]
        # The running sum goes on from one row to the next.
        ends = self.shares[rows[order], ids[order]].cumsum(dim=0)
        ahead = self._ends.gather(1, bucket) - inside.cumsum(dim=0)
        found = torch.searchsorted(ends, places - ahead, right=True)
        return ids[order[found]][:, 0], ends[found] + ahead
