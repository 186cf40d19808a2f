"""A gated delta net on a CPU: the formula, computed token by token."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.cpu_delta_net import (
    DeltaNetProducts,
    DeltaNetStates,
    DeltaNetWeights,
    Sequences,
    compute_delta_net,
)
from keepsight.models.cpu_library import number

pytestmark = pytest.mark.usefixtures("build", "threads")
SLOTS, HEADS, KEYS, SIZE, EPS = 5, 4, 24, 4, 1e-5


def draw_weights(values: int, key_heads: int) -> DeltaNetWeights:
    channels = 2 * key_heads * KEYS + HEADS * values
    return DeltaNetWeights(
        filter=torch.randn(SIZE, channels),
        rate=torch.rand(HEADS),
        shift=torch.randn(HEADS),
        scale=torch.randn(values),
        key_heads=key_heads,
        eps=EPS,
    )


def draw_states(weights: DeltaNetWeights) -> DeltaNetStates:
    columns = torch.randn(SLOTS, weights.filter.shape[1], SIZE)
    return DeltaNetStates(columns, torch.randn(SLOTS, HEADS, KEYS, len(weights.scale)))


def draw_products(weights: DeltaNetWeights, num_tokens: int) -> DeltaNetProducts:
    return DeltaNetProducts(
        mixed=torch.randn(num_tokens, weights.filter.shape[1]),
        # Some decay is more than softplus takes exactly.
        decay=10 * torch.randn(num_tokens, HEADS),
        strength=torch.randn(num_tokens, HEADS),
        gate=torch.randn(num_tokens, HEADS * len(weights.scale)),
    )


def lay_out(lengths: Sequence[int], slots: Sequence[int]) -> Sequences:
    return Sequences(torch.tensor([0, *lengths]).cumsum(0), torch.tensor(slots))


def exactly(
    weights: DeltaNetWeights, columns: Tensor, state: Tensor, products: DeltaNetProducts
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a sequence's outputs, and its last columns and state, in double precision."""
    columns, state = columns.double(), state.double()
    mixed, decay, strength, gate = (each.double() for each in products)
    num_tokens, values = len(mixed), len(weights.scale)
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
    return normed * F.silu(gate), seen[:, -SIZE:], state


@pytest.mark.parametrize("lengths", [(1,), (9,), (2, 1, 7), (1, 1, 1)])
@pytest.mark.parametrize(("values", "key_heads"), [(16, 2), (48, 4), (64, 2), (208, 4)])
def test_each_sequence_gets_the_formula_from_its_own_state(
    values: int, key_heads: int, lengths: tuple[int, ...]
) -> None:
    weights = draw_weights(values, key_heads)
    states, products = draw_states(weights), draw_products(weights, sum(lengths))
    slots = [3, 0, 4][: len(lengths)]
    parts = zip(*(torch.split(each, list(lengths)) for each in products), strict=True)
    expected = [
        exactly(weights, states.columns[slot], states.state[slot], DeltaNetProducts(*part))
        for slot, part in zip(slots, parts, strict=True)
    ]
    untouched = [
        (slot, states.columns[slot].clone(), states.state[slot].clone()) for slot in {*range(SLOTS)} - {*slots}
    ]
    out = compute_delta_net(weights, states, products, lay_out(lengths, slots))
    torch.testing.assert_close(out.double(), torch.cat([each[0] for each in expected]), atol=1e-4, rtol=1e-4)
    for slot, (_, columns, state) in zip(slots, expected, strict=True):
        torch.testing.assert_close(states.columns[slot].double(), columns, atol=0, rtol=0)
        torch.testing.assert_close(states.state[slot].double(), state, atol=1e-5, rtol=1e-5)
    for slot, columns, state in untouched:
        assert torch.equal(states.columns[slot], columns)
        assert torch.equal(states.state[slot], state)


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_no_bit_depends_on_how_the_tokens_are_cut_or_on_other_sequences(cut: int) -> None:
    weights = draw_weights(48, 2)
    states, products = draw_states(weights), draw_products(weights, 12)
    alone = DeltaNetStates(*(each.clone() for each in states))
    ours = [each[3:].clone() for each in products]
    expected = compute_delta_net(weights, states, products, lay_out([3, 9], [0, 1]))
    parts = [
        compute_delta_net(weights, alone, DeltaNetProducts(*(each[tokens] for each in ours)), lay_out([length], [1]))
        for tokens, length in ((slice(cut), cut), (slice(cut, None), 9 - cut))
    ]
    assert torch.equal(torch.cat(parts), expected[3:])
    assert torch.equal(alone.state[1], states.state[1])
    assert torch.equal(alone.columns[1], states.columns[1])


def test_only_weights_that_fill_vectors_and_in_single_precision_fit() -> None:
    weights, lanes = draw_weights(48, 2), number("lanes")
    assert weights.fit_kernel()
    assert draw_weights(3 * lanes, 2).fit_kernel()
    assert not draw_weights(3 * lanes + lanes // 2, 2).fit_kernel()
    assert not weights._replace(filter=torch.randn(9, 288)).fit_kernel()
    assert not weights._replace(filter=weights.filter.bfloat16()).fit_kernel()
