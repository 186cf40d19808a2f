"""A gated delta net on a CPU: the formula, computed token by token."""

import pytest
import torch

from keepsight.models.cpu_delta_net import compute_delta_net, takes_weights
from keepsight.models.cpu_library import number
from keepsight.models.delta_net import DeltaNetProducts, DeltaNetStates
from tests.models.delta_nets import draw_products, draw_states, draw_weights, exactly, lay_out

pytestmark = pytest.mark.usefixtures("build", "threads")


@pytest.mark.parametrize("lengths", [(1,), (9,), (2, 1, 7), (1, 1, 1)])
@pytest.mark.parametrize(("values", "key_heads"), [(16, 2), (48, 4), (64, 2), (208, 4)])
def test_each_sequence_gets_the_formula_from_its_own_state(
    values: int, key_heads: int, lengths: tuple[int, ...]
) -> None:
    weights = draw_weights(values, key_heads)
    states, products = draw_states(weights), draw_products(weights, sum(lengths))
    slots = [3, 0, 4][: len(lengths)]
    expected = exactly(weights, states, products, lengths, slots)
    out = compute_delta_net(weights, states, products, lay_out(lengths, slots))
    torch.testing.assert_close(out.double(), expected.outputs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.columns.double(), expected.columns, atol=0, rtol=0)
    torch.testing.assert_close(states.state.double(), expected.state, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("ends", [(1,), (2, 7), (9,)])
def test_states_are_kept_as_if_the_tokens_were_cut_there(ends: tuple[int, ...]) -> None:
    weights = draw_weights(48, 2)
    states, products = draw_states(weights), draw_products(weights, 12)
    expected = [DeltaNetStates(*(each.clone() for each in states)) for _ in ends]
    for end, kept in zip(ends, expected, strict=True):
        beginning = DeltaNetProducts(*(each[3 : 3 + end].clone() for each in products))
        compute_delta_net(weights, kept, beginning, lay_out([end], [1]))
    kept_states = list(zip(ends, (3, 4), strict=False))
    compute_delta_net(weights, states, products, lay_out([3, 9], [0, 1], kept=((), kept_states)))
    for (_, slot), kept in zip(kept_states, expected, strict=True):
        assert torch.equal(states.state[slot], kept.state[1])
        assert torch.equal(states.columns[slot], kept.columns[1])


def test_only_weights_that_fill_vectors_and_in_single_precision_fit() -> None:
    weights, lanes = draw_weights(48, 2), number("lanes")
    assert takes_weights(weights)
    assert takes_weights(draw_weights(3 * lanes, 2))
    assert not takes_weights(draw_weights(3 * lanes + lanes // 2, 2))
    assert not takes_weights(weights._replace(filter=torch.randn(9, 288)))
    assert not takes_weights(weights._replace(filter=weights.filter.bfloat16()))
