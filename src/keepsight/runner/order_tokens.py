"""Which token of each row stands where, the likeliest first and of equals the smaller ids, though no row is sorted.

A place is told by how much of all that is likely comes before it.  Tokens are counted in buckets by their distance from
the likeliest, and only those of the bucket in which a place lies are put in order.  What is likely is counted in whole
numbers, whose sums are the same in any order and beside any other rows.  Knows nothing of what a place is wanted for.
"""

import torch
from torch import Tensor

# Of more rows, what each step leaves for the next would have left a processor's caches.
MOST_ROWS = 4
# So many shares are certain; those of all rows together stay below 2**63.
CERTAIN = 2.0**60
# In rows of no numbers each token has as many as any.
_UNKNOWN = 2.0**-40
# Enough for a distance of 43, at which nothing has a share any more.
_BUCKETS, _BUCKETS_OF_LOGIT = 2**16, 1500


class LikeliestFirst:
    """`values` [rows, vocabulary]: logits, minus infinity for what is ruled out."""

    def __init__(self, values: Tensor) -> None:
        assert len(values) <= MOST_ROWS
        self.values = values
        self.shares = (values.softmax(dim=-1).nan_to_num_(_UNKNOWN) * CERTAIN).long()
        distances = values.amax(dim=-1, keepdim=True) - values
        self._buckets = distances.mul_(_BUCKETS_OF_LOGIT).nan_to_num_(0).clamp_(max=_BUCKETS - 1).long()
        self._sums = self.shares.new_zeros(len(values), _BUCKETS).scatter_add_(1, self._buckets, self.shares)
        self._ends = self._sums.cumsum(dim=-1)

    @property
    def all_shares(self) -> Tensor:
        """[rows, 1]"""
        return self._ends[:, -1:]

    def find(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [rows]: of each row the first that has, with all before it, more shares than that [rows, 1].  And how
        many those are [rows, 1].  Places are from 0 to below all shares.
        """
        bucket = torch.searchsorted(self._ends, places, right=True)
        inside = self._sums.gather(1, bucket)
        rows, ids = (self._buckets == bucket).nonzero(as_tuple=True)
        order = self.values[rows, ids].sort(descending=True, stable=True).indices
        order = order[rows[order].sort(stable=True).indices]
        # One row after the other.
        ends = self.shares[rows[order], ids[order]].cumsum(dim=0)
        ahead = self._ends.gather(1, bucket) - inside.cumsum(dim=0)
        found = torch.searchsorted(ends, places - ahead, right=True)
        return ids[order[found]][:, 0], ends[found] + ahead
