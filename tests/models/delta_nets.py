"""A gated delta net's inputs, drawn at random, and its formula in double precision."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.delta_net import DeltaNetProducts, DeltaNetStates, DeltaNetWeights
from keepsight.models.sequence_rows import SequenceRows

SLOTS, HEADS, KEYS, SIZE, EPS = 5, 4, 24, 4, 1e-5


class Piece(NamedTuple):
    length: int
    state_slot: int | None
    kept_states: Sequence[tuple[int, int]] = ()
    start: int = 0


def draw_weights(values: int, key_heads: int, size: int = SIZE) -> DeltaNetWeights:
    channels = 2 * key_heads * KEYS + HEADS * values
    return DeltaNetWeights(
        filter=torch.randn(size, channels),
        rate=torch.rand(HEADS),
        shift=torch.randn(HEADS),
        scale=torch.randn(values),
        key_heads=key_heads,
        eps=EPS,
    )


def draw_states(weights: DeltaNetWeights) -> DeltaNetStates:
    size, channels = weights.filter.shape
    return DeltaNetStates(torch.randn(SLOTS, channels, size), torch.randn(SLOTS, HEADS, KEYS, len(weights.scale)))


def draw_products(weights: DeltaNetWeights, num_tokens: int) -> DeltaNetProducts:
    return DeltaNetProducts(
        mixed=torch.randn(num_tokens, weights.filter.shape[1]),
        # Some decay is more than softplus takes exactly, some so little that it is lost beside one.
        decay=10 * torch.randn(num_tokens, HEADS),
        strength=torch.randn(num_tokens, HEADS),
        gate=torch.randn(num_tokens, HEADS * len(weights.scale)),
    )


def lay_out(
    lengths: Sequence[int],
    slots: Sequence[int],
    device: torch.device | None = None,
    num_rows: int | None = None,
    num_sequences: int | None = None,
    kept: Sequence[Sequence[tuple[int, int]]] = ((), (), ()),
) -> SequenceRows:
    """`kept`: for each sequence, ends and slots."""
    pieces = list(map(Piece, lengths, slots, kept))
    return SequenceRows(pieces, device or torch.device("cpu"), num_rows, num_sequences)


class Results(NamedTuple):
    outputs: Tensor  # [tokens, heads * values]
    columns: Tensor  # [slots, channels, size]
    state: Tensor  # [slots, heads, keys, values]


def exactly(
    weights: DeltaNetWeights,
    states: DeltaNetStates,
    products: DeltaNetProducts,
    lengths: Sequence[int],
    slots: Sequence[int],
) -> Results:
    """Return the outputs of all sequences, and all states afterwards, in double precision."""
    columns, state = (each.double().clone() for each in states)
    parts = zip(*(torch.split(each, list(lengths)) for each in products), strict=True)
    outputs = []
    for slot, part in zip(slots, parts, strict=True):
        output, columns[slot], state[slot] = _exactly(weights, columns[slot], state[slot], DeltaNetProducts(*part))
        outputs.append(output)
    return Results(torch.cat(outputs), columns, state)


def _exactly(
    weights: DeltaNetWeights, columns: Tensor, state: Tensor, products: DeltaNetProducts
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a sequence's outputs, and its last columns and state."""
    mixed, decay, strength, gate = (each.double() for each in products)
    num_tokens, values, size = len(mixed), len(weights.scale), len(weights.filter)
    seen = torch.cat((columns, mixed.T), dim=1)
    filters = weights.filter.double().T[:, None]
    mixed = F.silu(F.conv1d(seen[None], filters, groups=len(filters))[0, :, -num_tokens:]).T
    num_keys = weights.key_heads * KEYS
    query, key, value = torch.split(mixed, [num_keys, num_keys, HEADS * values], dim=1)
    query, key = (F.normalize(each.reshape(num_tokens, -1, KEYS), dim=-1) for each in (query, key))
    query, key = (each.repeat_interleave(HEADS // weights.key_heads, dim=1) for each in (query, key))
    value, outputs = value.reshape(num_tokens, HEADS, values), []
    decay = torch.exp(-weights.rate.double() * F.softplus(decay + weights.shift.double()))
    for token in range(num_tokens):
        state = state * decay[token, :, None, None]
        wrong = value[token] - torch.einsum("hkv,hk->hv", state, key[token])
        wrong *= strength[token, :, None].sigmoid()
        state = state + torch.einsum("hk,hv->hkv", key[token], wrong)
        outputs.append(torch.einsum("hkv,hk->hv", state, query[token]) / KEYS**0.5)
    normed = F.rms_norm(torch.stack(outputs), (values,), weights.scale.double(), EPS).flatten(1)
    return normed * F.silu(gate), seen[:, -size:], state
