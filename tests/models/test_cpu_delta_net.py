"""A gated delta net on a CPU: the formula, computed token by token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.cpu_delta_net import DeltaNetInputs, DeltaNetWeights, compute_delta_net

pytestmark = pytest.mark.usefixtures("build", "threads")
SEQUENCES, HEADS, KEYS, SIZE, EPS = 2, 4, 24, 4, 1e-5


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


def draw_inputs(weights: DeltaNetWeights, num_tokens: int) -> DeltaNetInputs:
    channels, values = weights.filter.shape[1], len(weights.scale)
    return DeltaNetInputs(
        columns=torch.randn(SEQUENCES, channels, SIZE),
        state=torch.randn(SEQUENCES, HEADS, KEYS, values),
        mixed=torch.randn(SEQUENCES, num_tokens, channels),
        # Some decay is more than softplus takes exactly.
        decay=10 * torch.randn(SEQUENCES, num_tokens, HEADS),
        strength=torch.randn(SEQUENCES, num_tokens, HEADS),
        gate=torch.randn(SEQUENCES, num_tokens, HEADS * values),
    )


def exactly(weights: DeltaNetWeights, inputs: DeltaNetInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, and the last columns and state, in double precision."""
    columns, state, mixed, decay, strength, gate = (each.double() for each in inputs)
    num_tokens, values = mixed.shape[1], len(weights.scale)
    seen = torch.cat((columns, mixed.transpose(1, 2)), dim=2)
    filters = weights.filter.double().T[:, None]
    mixed = F.silu(F.conv1d(seen, filters, groups=len(filters))[..., -num_tokens:]).transpose(1, 2)
    num_keys = weights.key_heads * KEYS
    query, key, value = torch.split(mixed, [num_keys, num_keys, HEADS * values], dim=2)
    query, key = (F.normalize(each.reshape(SEQUENCES, num_tokens, -1, KEYS), dim=-1) for each in (query, key))
    query, key = (each.repeat_interleave(HEADS // weights.key_heads, dim=2) for each in (query, key))
    value, outputs = value.reshape(SEQUENCES, num_tokens, HEADS, values), []
    decay = torch.exp(-weights.rate.double() * F.softplus(decay + weights.shift.double()))
    for token in range(num_tokens):
        state = state * decay[:, token, :, None, None]
        wrong = value[:, token] - torch.einsum("shkv,shk->shv", state, key[:, token])
        wrong *= strength[:, token, :, None].sigmoid()
        state = state + torch.einsum("shk,shv->shkv", key[:, token], wrong)
        outputs.append(torch.einsum("shkv,shk->shv", state, query[:, token]) / KEYS**0.5)
    normed = F.rms_norm(torch.stack(outputs, dim=1), (values,), weights.scale.double(), EPS).flatten(2)
    return normed * F.silu(gate), seen[..., -SIZE:], state


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize(("values", "key_heads"), [(16, 2), (48, 4), (64, 2), (208, 4)])
def test_it_is_the_formula(values: int, key_heads: int, num_tokens: int) -> None:
    weights = draw_weights(values, key_heads)
    inputs = draw_inputs(weights, num_tokens)
    expected, columns, state = exactly(weights, inputs)
    torch.testing.assert_close(compute_delta_net(weights, inputs).double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(inputs.columns.double(), columns, atol=0, rtol=0)
    torch.testing.assert_close(inputs.state.double(), state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_no_bit_depends_on_how_the_tokens_are_cut_or_on_other_sequences(cut: int) -> None:
    weights = draw_weights(48, 2)
    inputs = draw_inputs(weights, 9)
    alone = DeltaNetInputs(*(each[1:].clone() for each in inputs))
    parts = [
        alone._replace(**{name: getattr(alone, name)[:, tokens].contiguous() for name in DeltaNetInputs._fields[2:]})
        for tokens in (slice(cut), slice(cut, None))
    ]
    expected = compute_delta_net(weights, inputs)
    assert torch.equal(torch.cat([compute_delta_net(weights, each) for each in parts], dim=1), expected[1:])
    assert torch.equal(alone.state, inputs.state[1:])
    assert torch.equal(alone.columns, inputs.columns[1:])


def test_only_weights_that_fill_vectors_and_in_single_precision_fit() -> None:
    weights = draw_weights(48, 2)
    assert weights.fit_kernel()
    assert not draw_weights(47, 2).fit_kernel()
    assert not weights._replace(filter=torch.randn(9, 288)).fit_kernel()
    assert not weights._replace(filter=weights.filter.bfloat16()).fit_kernel()
