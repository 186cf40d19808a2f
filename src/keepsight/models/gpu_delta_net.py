"""A gated delta net between its matrix products on a GPU: Triton kernels. cpu_delta_net.c gives the formula.

All is computed in float32 and token by token, so no bit of it depends on how a prompt is cut or on other sequences.
What does not depend on the token before is computed for all tokens at once: convolutions, lengths, factors, norms and
gates. For the rule itself a program goes through the tokens of one sequence with some values of one head, and holds
their state. What a token reads from the updated state is derived from what it reads before, so that both sums are
computed at the same time:

    query (decay * state + key x added) = decay * (query state) + (query key) * added

Padding rows get zeros. Knows tensors, not models. Exported by `gpu_kernels`.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepsight.models.delta_net import DeltaNetProducts, DeltaNetStates, DeltaNetWeights
from keepsight.models.sequence_rows import SequenceRows

# Values of a head that a program of the rule holds: few, so that it takes little time per token, but whole pieces of
# memory. A constant, as other sums would be added in another order.
VALUES_AT_ONCE = 16
# Channels of which a program keeps the last columns.
CHANNELS_AT_ONCE = 256


def compute_delta_net(
    weights: DeltaNetWeights, states: DeltaNetStates, products: DeltaNetProducts, sequences: SequenceRows
) -> Tensor:
    """Return the outputs [tokens, heads * values]."""
    mixed, decay, strength, gate = products
    (num_tokens, channels), num_sequences = mixed.shape, len(sequences.slots)
    heads, keys, values, size = len(weights.rate), weights.key_size, len(weights.scale), len(weights.filter)
    assert states.state.shape[1:] == (heads, keys, values)
    assert states.columns.shape[1:] == (channels, size)
    assert states.state.dtype is torch.float32
    assert all(each.is_contiguous() for each in (*weights[:4], *states, *products))
    out = torch.empty_like(gate)
    if not num_tokens:
        return out
    make = partial(torch.empty, device=mixed.device, dtype=torch.float32)
    convolved, read = make(num_tokens, channels), make(num_tokens, heads * values)
    factors = make(3, num_tokens, heads)
    places, kept = (sequences.first_rows, sequences.slots), sequences.kept_slots
    sizes = {"HEADS": heads, "KEY_HEADS": weights.key_heads, "KEYS": keys, "VALUES": values}
    _prepare[(num_tokens, weights.key_heads + heads)](
        convolved, *factors, mixed, decay, strength, states.columns, *weights[:3], *places, sequences.of_rows, kept,
        **sizes, SIZE=size, WIDTH=triton.next_power_of_2(max(keys, values)), num_warps=1,
    )  # fmt: skip
    _keep_columns[(num_sequences, triton.cdiv(channels, CHANNELS_AT_ONCE))](
        states.columns, mixed, *places,
        CHANNELS=channels, SIZE=size, WIDTH=CHANNELS_AT_ONCE, COLUMNS=triton.next_power_of_2(size),
    )  # fmt: skip
    at_once = min(VALUES_AT_ONCE, triton.next_power_of_2(values))
    _apply_rule[(heads * triton.cdiv(values, at_once), num_sequences)](
        read, states.state, convolved, *factors, *places, kept,
        **sizes, KEY_WIDTH=triton.next_power_of_2(keys), WIDTH=at_once, num_warps=1,
    )  # fmt: skip
    _norm_and_gate[(num_tokens, heads)](
        out, read, gate, weights.scale, sequences.of_rows, weights.eps,
        HEADS=heads, VALUES=values, WIDTH=triton.next_power_of_2(values), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _prepare(
    out, decays, strengths, overlaps, mixed, decay, strength, columns, filters, rates, shifts,
    first_rows, slots, of_rows, kept_slots,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute, of one token, a query and a key of length one, or a head's value and factors."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(of_rows + row)
    if sequence >= 0:
        first_row, slot, kept = tl.load(first_rows + sequence), tl.load(slots + sequence), tl.load(kept_slots + row)
        num_channels = 2 * KEY_HEADS * KEYS + HEADS * VALUES
        of_row = row * num_channels
        index = tl.arange(0, WIDTH)
        if part < KEY_HEADS:
            at, is_there = part * KEYS + index, index < KEYS
            query = _convolved(mixed, columns, filters, row, first_row, slot, kept, at, is_there, num_channels, SIZE)
            query = query * tl.rsqrt(tl.sum(query * query) + 1e-6) * tl.rsqrt(tl.full([], KEYS, tl.float32))
            tl.store(out + of_row + at, query, mask=is_there)
            at += KEY_HEADS * KEYS
            key = _convolved(mixed, columns, filters, row, first_row, slot, kept, at, is_there, num_channels, SIZE)
            key = key * tl.rsqrt(tl.sum(key * key) + 1e-6)
            tl.store(out + of_row + at, key, mask=is_there)
            tl.store(overlaps + row * HEADS + part, tl.sum(query * key))
        else:
            head = part - KEY_HEADS
            at, is_there = 2 * KEY_HEADS * KEYS + head * VALUES + index, index < VALUES
            value = _convolved(mixed, columns, filters, row, first_row, slot, kept, at, is_there, num_channels, SIZE)
            tl.store(out + of_row + at, value, mask=is_there)
            of_head = row * HEADS + head
            shifted = tl.load(decay + of_head).to(tl.float32) + tl.load(shifts + head).to(tl.float32)
            tl.store(decays + of_head, tl.exp(-tl.load(rates + head).to(tl.float32) * _softplus(shifted)))
            tl.store(strengths + of_head, tl.sigmoid(tl.load(strength + of_head).to(tl.float32)))


@triton.jit
def _convolved(
    mixed, columns, filters, row, first_row, slot, kept, channels, is_there, num_channels, SIZE: tl.constexpr
):  # fmt: skip
    """Pass some channels of a row through the convolution, over those before it or held columns.

    Where a state is kept, what it saw is what the columns are after the row.
    """
    total = tl.zeros(channels.shape, tl.float32)
    for index in tl.static_range(SIZE):
        source = row - (SIZE - 1) + index
        own = tl.load(mixed + source * num_channels + channels, mask=is_there & (source >= first_row), other=0.0)
        at = (slot * num_channels + channels) * SIZE + SIZE - (first_row - source)
        held = tl.load(columns + at, mask=is_there & (source < first_row), other=0.0)
        weights = tl.load(filters + index * num_channels + channels, mask=is_there, other=0.0)
        seen = own.to(tl.float32) + held.to(tl.float32)
        total += seen * weights.to(tl.float32)
        to = (kept * num_channels + channels) * SIZE + index
        tl.store(columns + to, seen, mask=is_there & (kept >= 0))
    return total * tl.sigmoid(total)


@triton.jit
def _softplus(number):
    # Triton has no log1p, which log(1 + x) * x / (1 + x - 1) is, as both roundings of 1 + x are the same.
    power = tl.exp(tl.minimum(number, 20.0))
    rounded = 1.0 + power
    small = tl.where(rounded == 1.0, power, tl.log(rounded) * power / tl.maximum(rounded - 1.0, 1e-30))
    return tl.where(number > 20.0, number, small)


@triton.jit
def _keep_columns(
    columns, mixed, first_rows, slots,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Keep the last inputs of some channels of a sequence: its own, behind those that were held."""
    sequence = tl.program_id(0)
    first_row, end = tl.load(first_rows + sequence), tl.load(first_rows + sequence + 1)
    if first_row < end:
        slot = tl.load(slots + sequence)
        channels = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        is_there = (channels < CHANNELS) & (column < SIZE)
        source = end - SIZE + column
        own = tl.load(mixed + source * CHANNELS + channels, mask=is_there & (source >= first_row), other=0.0)
        at = (slot * CHANNELS + channels) * SIZE + column
        held = tl.load(columns + at + (end - first_row), mask=is_there & (source < first_row), other=0.0)
        # They are overwritten, by other threads than those that read them.
        tl.debug_barrier()
        tl.store(columns + at, tl.where(source >= first_row, own.to(held.dtype), held), mask=is_there)


@triton.jit
def _apply_rule(
    out, states, convolved, decays, strengths, overlaps, first_rows, slots, kept_slots,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Read some columns of the state of one head of a sequence by each token, and update them."""
    sequence = tl.program_id(1)
    row, end = tl.load(first_rows + sequence), tl.load(first_rows + sequence + 1)
    if row < end:
        channels, pieces = 2 * KEY_HEADS * KEYS + HEADS * VALUES, tl.cdiv(VALUES, WIDTH)
        head, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
        key_head = head // (HEADS // KEY_HEADS)
        key, value = tl.arange(0, KEY_WIDTH), piece * WIDTH + tl.arange(0, WIDTH)
        is_key, is_value = key < KEYS, value < VALUES
        is_there = is_key[:, None] & is_value[None, :]
        slot = tl.load(slots + sequence)
        # Of the state of all heads.
        at, size = (head * KEYS + key)[:, None] * VALUES + value[None, :], HEADS * KEYS * VALUES
        state = tl.load(states + slot * size + at, mask=is_there, other=0.0)
        queries = convolved + key_head * KEYS + key
        keys = queries + KEY_HEADS * KEYS
        values = convolved + 2 * KEY_HEADS * KEYS + head * VALUES + value
        # A token's inputs are loaded while the one before it is computed.
        next_query = tl.load(queries + row * channels, mask=is_key, other=0.0)
        next_key = tl.load(keys + row * channels, mask=is_key, other=0.0)
        next_value = tl.load(values + row * channels, mask=is_value, other=0.0)
        next_decay, next_strength = tl.load(decays + row * HEADS + head), tl.load(strengths + row * HEADS + head)
        next_overlap = tl.load(overlaps + row * HEADS + key_head)
        for token in range(row, end):
            of_query, of_key, of_value = next_query, next_key, next_value
            decay, strength, overlap = next_decay, next_strength, next_overlap
            following = token + 1
            is_more = following < end
            next_query = tl.load(queries + following * channels, mask=is_key & is_more, other=0.0)
            next_key = tl.load(keys + following * channels, mask=is_key & is_more, other=0.0)
            next_value = tl.load(values + following * channels, mask=is_value & is_more, other=0.0)
            next_decay = tl.load(decays + following * HEADS + head, mask=is_more, other=0.0)
            next_strength = tl.load(strengths + following * HEADS + head, mask=is_more, other=0.0)
            next_overlap = tl.load(overlaps + following * HEADS + key_head, mask=is_more, other=0.0)
            known = tl.sum(state * of_key[:, None], 0)
            seen = tl.sum(state * of_query[:, None], 0)
            added = (of_value - decay * known) * strength
            state = state * decay + of_key[:, None] * added[None, :]
            tl.store(out + (token * HEADS + head) * VALUES + value, decay * seen + overlap * added, mask=is_value)
            kept = tl.load(kept_slots + token)
            if kept >= 0:
                tl.store(states + kept * size + at, state, mask=is_there)
        tl.store(states + slot * size + at, state, mask=is_there)


@triton.jit
def _norm_and_gate(
    out, read, gate, scale, of_rows, eps, HEADS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr
):
    """Norm what a token read from one head's state, and multiply it by the gate's activation; zeros for padding."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    is_there = columns < VALUES
    at = (row * HEADS + head) * VALUES + columns
    is_row = tl.load(of_rows + row) >= 0
    given = tl.load(read + at, mask=is_there & is_row, other=0.0)
    through = tl.load(gate + at, mask=is_there & is_row, other=0.0).to(tl.float32)
    scales = tl.load(scale + columns, mask=is_there, other=0.0).to(tl.float32)
    normed = given * tl.rsqrt(tl.sum(given * given) / VALUES + eps) * scales
    tl.store(out + at, normed * (through * tl.sigmoid(through)), mask=is_there)
