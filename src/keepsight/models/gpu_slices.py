"""A GPU's attention of slices of several tokens, whose keys are read where their pages lie: a Triton kernel.

A program has a *block*: some rows of one slice, and of their query heads those that share a key head, side by side as
its lanes.  A row sees one interval of its sequence's positions, whatever the reason.  All slices of a step are one
launch; where their blocks are fewer than a GPU has room for and what they see is long, that is shared out to several
programs, and a second launch sums the shares.  How many there are depends on all that is in the step, and so do the
last bits of what comes out.

A recorded step has places for more blocks than there are: those of nobody have no rows, and shares that are left with
nothing to see weigh nothing.

Knows tensors, nothing of models, as `gpu_kernels` does, which offers it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepsight.models.gpu_shares import LEAST_SIDE, keys_per_share, padded, sum_shares

# Of the queries that a program has, and of the keys (and as many values) that it has at once; and how many of either
# are enough, however small they are.
BYTES_OF_QUERIES, MOST_LANES = 32 * 1024, 128
BYTES_OF_KEYS, MOST_KEYS = 16 * 1024, 64
# Keys are found by slots that are read themselves: with fewer stages none would be on its way while others are used.
NUM_STAGES = 3
# As many as a GPU has at once.  It bounds the memory of what shares leave, too: of each program its lanes' sums.
MOST_PROGRAMS = 256
# Of fewer, summing the shares takes longer than it saves.
LEAST_KEYS_PER_SHARE = 512
# Below all scores, and a number: what a row sees nothing of weighs nothing.
NO_SCORE = tl.constexpr(-1e30)
LN_2 = tl.constexpr(math.log(2))


def attend_slices(
    out: Tensor,  # [rows, heads, head_dim], like the queries; of what lies in no block anything may be written
    query: Tensor,
    keys: Tensor,  # [slots, kv_heads, head_dim], like the values
    values: Tensor,
    seen: Tensor,  # [rows, 2]: where what a row sees begins and ends, of its positions; in a block never nothing
    blocks: Tensor,  # [blocks, 3]: its first row, how many, and the address of the slots of their sequence's positions
    num_blocks: int,  # about how many of them have rows
    longest: int,  # about how many keys a block sees at most
    scale: float,
    softcap: float | None,
) -> None:
    rows, num_heads, dim = query.shape
    num_kv_heads = keys.shape[1]
    assert all(each.is_contiguous() for each in (out, query, keys, values, seen, blocks))
    tile = _tile_for(query, keys)
    shares = num_shares(num_blocks, num_kv_heads, longest)
    sums = largest = weights = out
    if shares > 1:
        sums = query.new_empty(rows, num_heads, shares, dim, dtype=torch.float32)
        largest, weights = query.new_empty(2, rows, num_heads, shares, dtype=torch.float32)
    # Powers are of two; with a cap, of the cap's share that the score takes up, which is tanh(to_cap * x / 2).
    factor, to_cap = (scale, 0.0) if softcap is None else (softcap, 2 * scale / softcap)
    _attend_block[(num_kv_heads, len(blocks), shares)](
        sums, largest, weights, query, keys, values, seen, blocks, factor * math.log2(math.e), to_cap,
        CAPS=softcap is not None, SHARES=shares > 1, LEAST=LEAST_KEYS_PER_SHARE, KV_HEADS=num_kv_heads,
        **tile, **launch_of(tile),
    )  # fmt: skip
    if shares > 1:
        _add_shares[(rows * num_heads,)](out, sums, largest, weights, shares, DIM=dim, WIDTH=tile["WIDTH"])


def rows_per_block(query: Tensor, keys: Tensor) -> int:
    """At most; of queries and keys as above."""
    tile = _tile_for(query, keys)
    return tile["LANES"] // tile["GROUP"]


def _tile_for(query: Tensor, keys: Tensor) -> dict[str, int]:
    return tile_of(query.shape[1] // keys.shape[1], query.shape[2], keys.itemsize)


def tile_of(group: int, dim: int, bytes_per_number: int) -> dict[str, int]:
    """What a program has of queries, of `group` heads for each key head, and at once of keys."""
    width = padded(dim)
    of_row = width * bytes_per_number
    lanes = max(padded(group), min(MOST_LANES, BYTES_OF_QUERIES // of_row))
    num_keys = max(LEAST_SIDE, min(MOST_KEYS, BYTES_OF_KEYS // of_row))
    return {"GROUP": group, "LANES": lanes, "KEYS": num_keys, "DIM": dim, "WIDTH": width}


def launch_of(tile: dict[str, int]) -> dict[str, int]:
    return {"num_warps": 8 if tile["LANES"] >= 128 else 4, "num_stages": NUM_STAGES}


def num_shares(num_blocks: int, num_kv_heads: int, longest: int) -> int:
    """A power of two."""
    most = min(MOST_PROGRAMS // (num_blocks * num_kv_heads), longest // LEAST_KEYS_PER_SHARE)
    return 1 << (max(1, most).bit_length() - 1)


@triton.jit
def _attend_block(
    sums, largest, weights, query, keys, values, seen, blocks, factor, to_cap,
    CAPS: tl.constexpr, SHARES: tl.constexpr, LEAST: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    kv_head, block, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, num_rows = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1)
    table = tl.load(blocks + 3 * block + 2).to(tl.pointer_type(tl.int64))
    lanes, columns = tl.arange(0, LANES), tl.arange(0, WIDTH)
    # Lanes of nobody do what those of the last row do; a block of nobody has the first row's, and sees nothing.
    rows = first_row + tl.minimum(lanes // GROUP, tl.maximum(num_rows - 1, 0))
    begins, ends = tl.load(seen + 2 * rows).to(tl.int32), tl.load(seen + 2 * rows + 1).to(tl.int32)
    begin, end = tl.min(begins), tl.max(ends)
    # What all rows see.
    begin_of_all, end_of_all = tl.max(begins), tl.min(ends)
    num_keys = tl.maximum(keys_per_share(begin, end, tl.num_programs(2), KEYS), LEAST)
    first = begin + share * num_keys
    last = tl.where(num_rows > 0, tl.minimum(first + num_keys, end), first)

    heads = rows * (KV_HEADS * GROUP) + kv_head * GROUP + lanes % GROUP
    is_column = columns < DIM
    queries = tl.load(query + heads[:, None] * DIM + columns[None, :], mask=is_column[None, :], other=0.0)
    top = tl.full([LANES], NO_SCORE, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    summed = tl.zeros([LANES, WIDTH], tl.float32)
    for start in range(first, last, KEYS):
        positions = start + tl.arange(0, KEYS)
        # Behind the end the last is read again, and not seen.
        slots = tl.load(table + tl.minimum(positions, end - 1))
        places = (slots * KV_HEADS + kv_head)[:, None] * DIM + columns[None, :]
        some_keys = tl.load(keys + places, mask=is_column[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(some_keys), input_precision="ieee")
        if CAPS:
            # tanh, from what Triton has: 1 - 2 / (e^2x + 1) is -1 and 1 at the ends, too.
            scores = 1 - 2 / (tl.exp(scores * to_cap) + 1)
        if (start < begin_of_all) | (start + KEYS > end_of_all):
            is_seen = (positions[None, :] >= begins[:, None]) & (positions[None, :] < ends[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        shrink = tl.exp2(top - new_top)
        likely = tl.exp2(scores * factor - new_top[:, None])
        total = total * shrink + tl.sum(likely, 1)
        some_values = tl.load(values + places, mask=is_column[None, :], other=0.0)
        summed = summed * shrink[:, None]
        summed = tl.dot(likely.to(some_values.dtype), some_values, summed, input_precision="ieee")
        top = new_top

    is_row = lanes < num_rows * GROUP
    at = heads * tl.num_programs(2) + share
    if SHARES:
        # Where they are summed powers are of e.
        tl.store(largest + at, top * LN_2, mask=is_row)
        tl.store(weights + at, total, mask=is_row)
    else:
        summed = summed / total[:, None]
    saw = lanes < tl.where(first < last, num_rows * GROUP, 0)
    is_there = saw[:, None] & is_column[None, :]
    tl.store(sums + at[:, None] * DIM + columns[None, :], summed.to(sums.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["num_shares"])
def _add_shares(out, sums, largest, weights, num_shares, DIM: tl.constexpr, WIDTH: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    sum_shares(out, head, sums, largest, weights, head, num_shares, num_shares, DIM, WIDTH)
