"""Triton kernels for the work between matrix products, where torch needs too many launches or reads too much.

The time of a step of single tokens is that of launches and memory reads. Norms, gates and rotation take fewer launches
here than in torch, and keys are read from their pages in place. The attention of longer slices is in `gpu_slices.py`,
that of towers in `gpu_whole_sight.py`; gated delta nets are in `gpu_delta_net.py`. A row's results depend on that row
alone; the last bits of a longer slice's attention also depend on what else is in the step.

Knows tensors, not models. Callers get it from `gpu_library`, the only place where Triton is imported.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepsight.models.gpu_delta_net import compute_delta_net
from keepsight.models.gpu_shares import LEAST_SIDE, keys_per_share, padded, sum_shares
from keepsight.models.gpu_slices import attend_slices, rows_per_block
from keepsight.models.gpu_whole_sight import attend_to_all, place_patches

__all__ = [
    "add_and_norm",
    "attend_rows",
    "attend_slices",
    "attend_to_all",
    "compute_delta_net",
    "gate",
    "norm",
    "place_heads",
    "place_patches",
    "rows_per_block",
    "write_heads",
]

# Programs for the attention of one row: enough to fill a GPU with that row alone. Constant whatever the batch, as
# another number would sum in another order.
PROGRAMS_PER_ROW = 128
# Size of the keys that a program loads at once, and likewise of the values.
BYTES_OF_KEYS = 16 * 1024
# Elements per program of the gate: small enough that one row gives the GPU enough programs.
GATED_AT_ONCE = 512


# Norms --------------------------------------------------------------------------------------------------------


def norm(hidden: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return hidden / rms(hidden) * scale over the last dimension, computed in float32."""
    hidden = hidden.contiguous()
    out, size = torch.empty_like(hidden), hidden.shape[-1]
    rows = hidden.numel() // size
    if rows:
        _norm[(rows,)](out, hidden, scale, size, eps, WIDTH=triton.next_power_of_2(size))
    return out


@triton.jit
def _norm(out, hidden, scale, size, eps, WIDTH: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, WIDTH)
    is_there = columns < size
    given = tl.load(hidden + first + columns, mask=is_there, other=0.0)
    scales = tl.load(scale + columns, mask=is_there, other=0.0)
    tl.store(out + first + columns, _normed(given, scales, size, eps), mask=is_there)


@triton.jit
def _normed(given, scales, size, eps):
    numbers = given.to(tl.float32)
    return (numbers * tl.rsqrt(tl.sum(numbers * numbers) / size + eps) * scales).to(given.dtype)


def add_and_norm(
    sums: Tensor,  # [rows, size]
    result: Tensor,
    of_result: Tensor | None,  # the scale by which `result` is normed before it is added
    scale: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return sums + result, and that normed. Intermediate values are rounded where torch's operations round them."""
    assert all(each.is_contiguous() for each in (sums, result))
    added, out, size = torch.empty_like(sums), torch.empty_like(sums), sums.shape[-1]
    if len(sums):
        _add_and_norm[(len(sums),)](
            added, out, sums, result, scale if of_result is None else of_result, scale,
            size, eps, NORMS=of_result is not None, WIDTH=triton.next_power_of_2(size),
        )  # fmt: skip
    return added, out


@triton.jit
def _add_and_norm(
    added, out, sums, result, of_result, scale, size, eps, NORMS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, WIDTH)
    is_there = columns < size
    given = tl.load(result + first + columns, mask=is_there, other=0.0)
    # Issue all loads before waiting for any.
    base = tl.load(sums + first + columns, mask=is_there, other=0.0)
    scales = tl.load(scale + columns, mask=is_there, other=0.0)
    if NORMS:
        given = _normed(given, tl.load(of_result + columns, mask=is_there, other=0.0), size, eps)
    whole = (base.to(tl.float32) + given.to(tl.float32)).to(given.dtype)
    tl.store(added + first + columns, whole, mask=is_there)
    tl.store(out + first + columns, _normed(whole, scales, size, eps), mask=is_there)


# Gates --------------------------------------------------------------------------------------------------------


def gate(both: Tensor, activation: str) -> Tensor:
    """[rows, 2 * wide], each row a gate and the numbers it multiplies -> [rows, wide]"""
    assert both.is_contiguous()
    rows, wide = len(both), both.shape[1] // 2
    out = both.new_empty(rows, wide)
    if rows:
        _gate[(rows, triton.cdiv(wide, GATED_AT_ONCE))](out, both, wide, ACTIVATION=activation, WIDTH=GATED_AT_ONCE)
    return out


@triton.jit
def _gate(out, both, wide, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_there = columns < wide
    given = tl.load(both + row * 2 * wide + columns, mask=is_there, other=0.0)
    through = tl.load(both + (row * 2 + 1) * wide + columns, mask=is_there, other=0.0)
    opened = _times(_activated(given.to(tl.float32), ACTIVATION).to(given.dtype), through)
    tl.store(out + row * wide + columns, opened.to(given.dtype), mask=is_there)


@triton.jit
def _activated(numbers, ACTIVATION: tl.constexpr):
    """Apply the activation: each number times the fraction of it that is let through."""
    if ACTIVATION == "silu":
        opening = tl.sigmoid(numbers)
    elif ACTIVATION == "gelu":
        opening = 0.5 + 0.5 * tl.erf(numbers * 0.7071067811865476)
    else:
        tl.static_assert(ACTIVATION == "gelu_pytorch_tanh")
        # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
        opening = tl.sigmoid(1.5957691216057308 * (numbers + 0.044715 * numbers * numbers * numbers))
    return numbers * opening


# Heads --------------------------------------------------------------------------------------------------------


def place_heads(
    projected: Tensor,  # [tokens, heads + 2 * kv_heads, head_dim]
    scales: Tensor | None,  # [heads + kv_heads, head_dim]; None: no norm
    eps: float,
    cos: Tensor,  # [tokens, 1, head_dim], like the sines, whose first half is negated
    sin: Tensor,
    keys: Tensor,  # [slots, kv_heads, head_dim], like the values
    values: Tensor,
    slots: Tensor,  # [tokens]; negative for padding
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to slots; return queries [tokens, heads, head_dim]."""
    num_tokens, num_all, dim = projected.shape
    num_kv_heads = keys.shape[1]
    query = projected.new_empty(num_tokens, num_all - 2 * num_kv_heads, dim)
    assert all(each.is_contiguous() for each in (projected, cos, sin, keys, values, slots))
    assert scales is None or scales.is_contiguous()
    if num_tokens:
        _place_heads[(num_tokens, num_all)](
            query, keys, values, projected, cos if scales is None else scales, cos, sin, slots, eps,
            NORMS=scales is not None,
            HEADS=query.shape[1], KV_HEADS=num_kv_heads, DIM=dim, WIDTH=triton.next_power_of_2(dim),
        )  # fmt: skip
    return query


@triton.jit
def _place_heads(
    query, keys, values, projected, scales, cos, sin, slots, eps,
    NORMS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    columns = tl.arange(0, WIDTH)
    is_there = columns < DIM
    source = projected + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    given = tl.load(source + columns, mask=is_there, other=0.0)
    if head >= HEADS + KV_HEADS:
        at = (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM
        tl.store(values + at + columns, given, mask=is_there & (slot >= 0))
    else:
        # The other coordinate of each pair.
        others = (columns + DIM // 2) % DIM
        other = tl.load(source + others, mask=is_there, other=0.0)
        if NORMS:
            numbers, other_numbers = given.to(tl.float32), other.to(tl.float32)
            root = tl.rsqrt(tl.sum(numbers * numbers) / DIM + eps)
            given = (numbers * root * tl.load(scales + head * DIM + columns, mask=is_there, other=0.0)).to(given.dtype)
            other_scales = tl.load(scales + head * DIM + others, mask=is_there, other=0.0)
            other = (other_numbers * root * other_scales).to(given.dtype)
        by_cos = _times(given, tl.load(cos + token * DIM + columns, mask=is_there, other=0.0))
        by_sin = _times(other, tl.load(sin + token * DIM + columns, mask=is_there, other=0.0))
        rotated = (by_cos + by_sin).to(given.dtype)
        if head < HEADS:
            tl.store(query + (token * HEADS + head) * DIM + columns, rotated, mask=is_there)
        else:
            at = (slot * KV_HEADS + head - HEADS) * DIM
            tl.store(keys + at + columns, rotated, mask=is_there & (slot >= 0))


def write_heads(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write keys [tokens, kv_heads, head_dim] and values to slots, which are negative for padding."""
    num_tokens, size = len(key), key[0].numel() if len(key) else 0
    assert key.shape == value.shape
    assert key.shape[1:] == keys.shape[1:]
    assert all(each.is_contiguous() for each in (key, value, keys, values, slots))
    if num_tokens:
        _write_heads[(num_tokens,)](keys, values, key, value, slots, SIZE=size, WIDTH=triton.next_power_of_2(size))


@triton.jit
def _write_heads(keys, values, key, value, slots, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    columns = tl.arange(0, WIDTH)
    is_there = (columns < SIZE) & (slot >= 0)
    given_key = tl.load(key + token * SIZE + columns, mask=is_there, other=0.0)
    given_value = tl.load(value + token * SIZE + columns, mask=is_there, other=0.0)
    tl.store(keys + slot * SIZE + columns, given_key, mask=is_there)
    tl.store(values + slot * SIZE + columns, given_value, mask=is_there)


@triton.jit
def _times(some, others):
    """Multiply, round to the dtype of `some`, and return as float32."""
    return (some.to(tl.float32) * others.to(tl.float32)).to(some.dtype).to(tl.float32)


# Attention of single tokens -----------------------------------------------------------------------------------


def attend_rows(
    out: Tensor,  # [tokens, heads, head_dim], like the queries
    query: Tensor,
    keys: Tensor,  # [slots, kv_heads, head_dim], like the values
    values: Tensor,
    tables: Tensor,  # [rows]: address of the slot table of the row's sequence
    ends: Tensor,  # [rows]: the row sees positions before this; 0 for padding
    places: Tensor | None,  # [rows]: token index of each row; None: rows are all tokens, and padding's output is 0
    scale: float,
    window: int | None,  # if set, only the last `window` of those positions are seen
    softcap: float | None,
) -> None:
    """Split the keys of each row among several programs, depending only on their number; then sum the shares."""
    rows, (_, num_heads, dim) = len(ends), query.shape
    num_kv_heads = keys.shape[1]
    given = (out, query, keys, values, tables, ends) + (() if places is None else (places,))
    assert all(each.is_contiguous() for each in given)
    sight = sight_of(dim, num_kv_heads, keys.itemsize, window)
    shares = sight["SHARES"]
    sums = query.new_empty(rows, num_heads, shares, dim, dtype=torch.float32)
    # The largest score of each share, and the sum of its weights.
    of_shares = query.new_empty(2, rows, num_heads, shares, dtype=torch.float32)
    group = num_heads // num_kv_heads
    of_rows = (ends, ends if places is None else places)
    if rows:
        _attend_share[(rows, num_kv_heads, shares)](
            sums, *of_shares, query, keys, values, tables, *of_rows, scale, PLACED=places is not None,
            SOFTCAP=softcap or 0.0, GROUP=group, LANES=padded(group), KV_HEADS=num_kv_heads, **sight,
        )  # fmt: skip
        _add_shares[(rows, num_heads)](
            out, sums, *of_shares, *of_rows, PLACED=places is not None, HEADS=num_heads, **sight
        )


def sight_of(dim: int, num_kv_heads: int, bytes_per_number: int, window: int | None) -> dict[str, int]:
    """Return how a row's visible keys are split among programs, and how many of them a program loads at once."""
    width = padded(dim)
    num_keys = max(LEAST_SIDE, BYTES_OF_KEYS // (width * bytes_per_number))
    shares = max(1, PROGRAMS_PER_ROW // num_kv_heads)
    if window is not None:
        shares = min(shares, triton.cdiv(window, num_keys))
    return {"WINDOW": window or 0, "KEYS": num_keys, "SHARES": shares, "DIM": dim, "WIDTH": width}


@triton.jit
def _first_seen(end, WINDOW: tl.constexpr):
    return tl.maximum(end - WINDOW, 0) if WINDOW > 0 else end * 0


@triton.jit
def _attend_share(
    sums, largest, weights, query, keys, values, tables, ends, places, scale, PLACED: tl.constexpr,
    SOFTCAP: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SHARES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, kv_head, share = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    end = tl.load(ends + row)
    begin = _first_seen(end, WINDOW)
    num_keys = keys_per_share(begin, end, SHARES, KEYS)
    first = begin + share * num_keys
    last = tl.minimum(first + num_keys, end)
    if first < last:
        # A lane is one of the query heads that share this key head.
        lanes, columns = tl.arange(0, LANES), tl.arange(0, WIDTH)
        is_lane, is_column = lanes < GROUP, columns < DIM
        of_row = kv_head * GROUP + lanes
        heads = row * (KV_HEADS * GROUP) + of_row
        token = tl.load(places + row) if PLACED else row
        of_token = (token * (KV_HEADS * GROUP) + of_row)[:, None] * DIM + columns[None, :]
        is_query = is_lane[:, None] & is_column[None, :]
        queries = tl.load(query + of_token, mask=is_query, other=0.0)
        table = tl.load(tables + row).to(tl.pointer_type(tl.int64))
        top = tl.full([LANES], float("-inf"), tl.float32)
        total = tl.zeros([LANES], tl.float32)
        summed = tl.zeros([LANES, WIDTH], tl.float32)
        for start in range(first, last, KEYS):
            positions = start + tl.arange(0, KEYS)
            is_seen = positions < last
            slots = tl.load(table + positions, mask=is_seen, other=0)
            at_slots = (slots * KV_HEADS + kv_head)[:, None] * DIM + columns[None, :]
            is_key = is_seen[:, None] & is_column[None, :]
            some_keys = tl.load(keys + at_slots, mask=is_key, other=0.0)
            scores = tl.dot(queries, tl.trans(some_keys), input_precision="ieee") * scale
            if SOFTCAP > 0:
                # tanh(x) = 1 - 2 / (e^2x + 1), as Triton has no tanh; also -1 and 1 at the extremes.
                scores = (1 - 2 / (tl.exp(scores * (2 / SOFTCAP)) + 1)) * SOFTCAP
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp(top - new_top)
            likely = tl.exp(scores - new_top[:, None])
            total = total * shrink + tl.sum(likely, 1)
            some_values = tl.load(values + at_slots, mask=is_key, other=0.0)
            summed = summed * shrink[:, None]
            summed += tl.dot(likely.to(some_values.dtype), some_values, input_precision="ieee")
            top = new_top
        at = heads * SHARES + share
        tl.store(sums + at[:, None] * DIM + columns[None, :], summed, mask=is_query)
        tl.store(largest + at, top, mask=is_lane)
        tl.store(weights + at, total, mask=is_lane)


@triton.jit
def _add_shares(
    out, sums, largest, weights, ends, places, PLACED: tl.constexpr, HEADS: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SHARES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = row * HEADS + tl.program_id(1)
    end = tl.load(ends + row)
    begin = _first_seen(end, WINDOW)
    num_shares = tl.cdiv(end - begin, tl.maximum(keys_per_share(begin, end, SHARES, KEYS), 1))
    if PLACED:
        if end > 0:
            to = tl.load(places + row) * HEADS + tl.program_id(1)
            sum_shares(out, to, sums, largest, weights, head, num_shares, SHARES, DIM, WIDTH)
    else:
        sum_shares(out, head, sums, largest, weights, head, num_shares, SHARES, DIM, WIDTH)
