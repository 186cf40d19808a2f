"""Helpers of the GPU attention kernels: the minimum tile size, and the split of a row's keys among several programs.

A program's share is a run of consecutive keys. It stores their weighted sum of values, with weights relative to the
largest score of the share, and next to it that score and the sum of the weights. Knows nothing of whose keys they are.
"""

import triton
import triton.language as tl

# The smallest tile side that a tensor core multiplies.
LEAST_SIDE = 16


def padded(size: int) -> int:
    """Return the tile side that holds `size`: a power of two, at least `LEAST_SIDE`."""
    return max(LEAST_SIDE, int(triton.next_power_of_2(size)))


@triton.jit
def keys_per_share(begin, end, num_shares, KEYS: tl.constexpr):
    return tl.cdiv(tl.cdiv(end - begin, KEYS), num_shares) * KEYS


@triton.jit
def sum_shares(
    out, to, sums, largest, weights, head, num_shares, num_places, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Combine the first `num_shares` of the `num_places` shares of `head` into head `to` of `out`."""
    columns = tl.arange(0, WIDTH)
    is_there = columns < DIM
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    summed = tl.zeros([WIDTH], tl.float32)
    for share in range(num_shares):
        at = head * num_places + share
        new_top = tl.maximum(top, tl.load(largest + at))
        shrink, grow = tl.exp(top - new_top), tl.exp(tl.load(largest + at) - new_top)
        weight = tl.load(weights + at)
        total = total * shrink + weight * grow
        summed = summed * shrink
        # A share without visible keys stored no sum.
        if weight > 0:
            summed += tl.load(sums + at * DIM + columns, mask=is_there, other=0.0) * grow
        top = new_top
    # If no share saw any keys, the result is 0.
    mean = summed / tl.where(total > 0, total, 1.0)
    tl.store(out + to * DIM + columns, mean.to(out.dtype.element_ty), mask=is_there)
