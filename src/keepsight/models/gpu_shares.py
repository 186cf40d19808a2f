"""What kernels of a GPU's attention have in common: what is multiplied at least, and how a row's keys are shared out to
several programs.

A program's share is so many keys in a row; it leaves the sum of their values as weighed against the largest of its own
scores, and that score and the weights' sum beside it.  Knows nothing of whose keys they are.
"""

import triton
import triton.language as tl

# The least that a tensor core multiplies, in any direction.
LEAST_SIDE = 16


def padded(size: int) -> int:
    """What so many are in the direction in which they are multiplied."""
    return max(LEAST_SIDE, int(triton.next_power_of_2(size)))


@triton.jit
def keys_per_share(begin, end, num_shares, KEYS: tl.constexpr):
    return tl.cdiv(tl.cdiv(end - begin, KEYS), num_shares) * KEYS


@triton.jit
def sum_shares(
    out, to, sums, largest, weights, head, num_shares, num_places, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Of a row's head, that has places for more shares than there may be, to one of `out`."""
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
        # A share that saw nothing has left no sum.
        if weight > 0:
            summed += tl.load(sums + at * DIM + columns, mask=is_there, other=0.0) * grow
        top = new_top
    # Of what nobody sees the sum is 0, too.
    mean = summed / tl.where(total > 0, total, 1.0)
    tl.store(out + to * DIM + columns, mean.to(out.dtype.element_ty), mask=is_there)
