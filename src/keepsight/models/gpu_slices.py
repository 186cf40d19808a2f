"""GPU attention of slices of several tokens, reading keys from their pages in place: a Triton kernel.

A program computes a *block*: some rows of one slice, with the query heads that share a key head laid side by side as
its lanes. A row sees one interval of its sequence's positions, whatever the kind of layer. All slices of a step are
one launch. If there are fewer blocks than the GPU runs at once and they see many keys, the keys are split among
several programs, and a second launch sums the shares. The number of shares depends on everything in the step, and so
do the last bits of the results.

A recorded step has places for more blocks than there are. Padding blocks have no rows, and shares with no visible keys
have weight zero.

Knows tensors, not models. Exported by `gpu_kernels`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepsight.models.gpu_shares import LEAST_SIDE, keys_per_share, padded, sum_shares

# Limits in bytes on the queries of a program, and on the keys (likewise the values) that it loads at once; and limits
# on their number when they are small.
BYTES_OF_QUERIES, MOST_LANES = 32 * 1024, 128
BYTES_OF_KEYS, MOST_KEYS = 16 * 1024, 64
# Keys are addressed by slots that must be loaded first: with fewer stages no load would overlap with computation.
NUM_STAGES = 3
# As many as a GPU runs at once. Also bounds the memory for shares: each program stores its lanes' sums.
MOST_PROGRAMS = 256
# With fewer, summing the shares takes longer than splitting saves.
LEAST_KEYS_PER_SHARE = 512
# Below all scores but finite, so that a share in which a row sees nothing has weight zero.
NO_SCORE = tl.constexpr(-1e30)
LN_2 = tl.constexpr(math.log(2))


def attend_slices(
    out: Tensor,  # [rows, heads, head_dim], like the queries; rows outside all blocks may get any values
    query: Tensor,
    keys: Tensor,  # [slots, kv_heads, head_dim], like the values
    values: Tensor,
    seen: Tensor,  # [rows, 2]: begin and end of a row's visible positions; not empty for rows of a block
    blocks: Tensor,  # [blocks, 3]: first row, number of rows, and the address of their sequence's slot table
    num_blocks: int,  # approximate number of blocks that have rows
    longest: int,  # approximate largest number of keys that a block sees
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
    # Exponentials are powers of two. With a softcap the score is softcap * tanh(to_cap * x / 2).
    factor, to_cap = (scale, 0.0) if softcap is None else (softcap, 2 * scale / softcap)
    _attend_block[(num_kv_heads, len(blocks), shares)](
        sums, largest, weights, query, keys, values, seen, blocks, factor * math.log2(math.e), to_cap,
        CAPS=softcap is not None, SHARES=shares > 1, LEAST=LEAST_KEYS_PER_SHARE, KV_HEADS=num_kv_heads,
        **tile, **launch_of(tile),
    )  # fmt: skip
    if shares > 1:
        _add_shares[(rows * num_heads,)](out, sums, largest, weights, shares, DIM=dim, WIDTH=tile["WIDTH"])


def rows_per_block(query: Tensor, keys: Tensor) -> int:
    """Return the largest number of rows in a block, for such queries and keys."""
    tile = _tile_for(query, keys)
    return tile["LANES"] // tile["GROUP"]


def _tile_for(query: Tensor, keys: Tensor) -> dict[str, int]:
    return tile_of(query.shape[1] // keys.shape[1], query.shape[2], keys.itemsize)


def tile_of(group: int, dim: int, bytes_per_number: int) -> dict[str, int]:
    """Return the tile of a program: its queries, with `group` heads per key head, and the keys it loads at once."""
    width = padded(dim)
    of_row = width * bytes_per_number
    lanes = max(padded(group), min(MOST_LANES, BYTES_OF_QUERIES // of_row))
    num_keys = max(LEAST_SIDE, min(MOST_KEYS, BYTES_OF_KEYS // of_row))
    return {"GROUP": group, "LANES": lanes, "KEYS": num_keys, "DIM": dim, "WIDTH": width}


def launch_of(tile: dict[str, int]) -> dict[str, int]:
    return {"num_warps": 8 if tile["LANES"] >= 128 else 4, "num_stages": NUM_STAGES}


def num_shares(num_blocks: int, num_kv_heads: int, longest: int) -> int:
    """Return the number of programs among which the keys of a block are split: a power of two."""
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
    # Padding lanes compute the same as the last row's; a padding block reads row 0 and sees nothing.
    rows = first_row + tl.minimum(lanes // GROUP, tl.maximum(num_rows - 1, 0))
    begins, ends = tl.load(seen + 2 * rows).to(tl.int32), tl.load(seen + 2 * rows + 1).to(tl.int32)
    begin, end = tl.min(begins), tl.max(ends)
    # The interval that all rows see: no mask is needed inside it.
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
        # Past the end the last slot is read again, and masked.
        slots = tl.load(table + tl.minimum(positions, end - 1))
        places = (slots * KV_HEADS + kv_head)[:, None] * DIM + columns[None, :]
        some_keys = tl.load(keys + places, mask=is_column[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(some_keys), input_precision="ieee")
        if CAPS:
            # tanh(x) = 1 - 2 / (e^2x + 1), as Triton has no tanh; also -1 and 1 at the extremes.
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
        # `sum_shares` uses powers of e.
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
