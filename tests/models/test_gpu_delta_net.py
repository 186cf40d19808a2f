"""A gated delta net on a GPU: the formula, computed token by token."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from keepsight.models.delta_net import DeltaNetProducts, DeltaNetStates, DeltaNetWeights
from tests.models.delta_nets import draw_products, draw_states, draw_weights, exactly, lay_out
from tests.models.gpu_kernels_here import (
    DEVICE,
    DTYPES,
    MAX_SHARED_BYTES,
    NUM_BYTES,
    Kernel,
    gpu_delta_net,
    gpu_kernels,
    shared_bytes_of,
)

Inputs = TypeVar("Inputs", DeltaNetWeights, DeltaNetStates, DeltaNetProducts)
HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def placed(given: Inputs, dtype: torch.dtype | None = None, device: torch.device = DEVICE) -> Inputs:
    moved: list[Any] = [each.to(device, dtype) if isinstance(each, Tensor) else each for each in given]
    return type(given)(*moved)


def compute(
    weights: DeltaNetWeights,
    states: DeltaNetStates,
    products: DeltaNetProducts,
    lengths: tuple[int, ...],
    slots: tuple[int, ...],
    num_rows: int | None = None,
    num_sequences: int | None = None,
    kept: Sequence[Sequence[tuple[int, int]]] = ((), (), ()),
) -> Tensor:
    sequences = lay_out(lengths, slots, DEVICE, num_rows, num_sequences, kept)
    return gpu_kernels.compute_delta_net(weights, states, products, sequences)


@pytest.mark.parametrize("lengths", [(1,), (9,), (2, 1, 7), (1, 1, 1)])
@pytest.mark.parametrize(
    ("values", "key_heads", "size"), [(16, 2, 4), (6, 4, 3)], ids=["filled tiles", "partly filled tiles"]
)
def test_each_sequence_gets_the_formula_from_its_own_state(
    values: int, key_heads: int, size: int, lengths: tuple[int, ...]
) -> None:
    weights = draw_weights(values, key_heads, size)
    states, products = draw_states(weights), draw_products(weights, sum(lengths))
    slots = (3, 0, 4)[: len(lengths)]
    expected = exactly(weights, states, products, lengths, slots)
    out = compute(placed(weights), states := placed(states), placed(products), lengths, slots)
    torch.testing.assert_close(out.double().cpu(), expected.outputs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.columns.double().cpu(), expected.columns, atol=0, rtol=0)
    torch.testing.assert_close(states.state.double().cpu(), expected.state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_and_products_may_have_any_dtype(dtype: torch.dtype) -> None:
    weights, lengths, slots = placed(draw_weights(16, 2), dtype), (5, 2), (1, 2)
    products, columns, state = placed(draw_products(weights, 7), dtype), *draw_states(weights)
    states = DeltaNetStates(columns.to(DEVICE, dtype), state.to(DEVICE))
    expected = exactly(
        placed(weights, device=HOST), placed(states, device=HOST), placed(products, device=HOST), lengths, slots
    )
    out = compute(weights, states, products, lengths, slots)
    assert out.dtype is dtype
    rounding = 1e-4 if dtype is torch.float32 else 5e-3
    torch.testing.assert_close(out.double().cpu(), expected.outputs, atol=rounding, rtol=rounding)
    torch.testing.assert_close(states.columns.double().cpu(), expected.columns, atol=0, rtol=0)
    torch.testing.assert_close(states.state.double().cpu(), expected.state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_no_bit_depends_on_how_the_tokens_are_cut_or_on_other_sequences(cut: int) -> None:
    weights = placed(draw_weights(16, 2))
    states, products = placed(draw_states(weights)), placed(draw_products(weights, 12))
    alone = DeltaNetStates(*(each.clone() for each in states))
    ours = [each[3:].clone() for each in products]
    expected = compute(weights, states, products, (3, 9), (0, 1))
    parts = [
        compute(weights, alone, DeltaNetProducts(*(each[tokens] for each in ours)), (length,), (1,))
        for tokens, length in ((slice(cut), cut), (slice(cut, None), 9 - cut))
    ]
    assert torch.equal(torch.cat(parts), expected[3:])
    assert torch.equal(alone.state[1], states.state[1])
    assert torch.equal(alone.columns[1], states.columns[1])


@pytest.mark.parametrize("ends", [(1,), (2, 7), (9,)])
def test_states_are_kept_as_if_the_tokens_were_cut_there(ends: tuple[int, ...]) -> None:
    weights = placed(draw_weights(16, 2))
    states, products = placed(draw_states(weights)), placed(draw_products(weights, 12))
    expected = [DeltaNetStates(*(each.clone() for each in states)) for _ in ends]
    for end, kept in zip(ends, expected, strict=True):
        compute(weights, kept, DeltaNetProducts(*(each[3 : 3 + end] for each in products)), (end,), (1,))
    kept_states = list(zip(ends, (3, 4), strict=False))
    compute(weights, states, products, (3, 9), (0, 1), kept=((), kept_states))
    for (_, slot), kept in zip(kept_states, expected, strict=True):
        assert torch.equal(states.state[slot], kept.state[1])
        assert torch.equal(states.columns[slot], kept.columns[1])


def test_precision_is_single_whatever_torch_s_default(set_default_dtype: Callable[[str], None]) -> None:
    weights = draw_weights(16, 2)
    states, products = draw_states(weights), draw_products(weights, 3)
    expected = exactly(weights, states, products, [3], [1])
    set_default_dtype("float16")
    out = compute(placed(weights), states := placed(states), placed(products), (3,), (1,))
    torch.testing.assert_close(out.double().cpu(), expected.outputs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states.state.double().cpu(), expected.state, atol=1e-5, rtol=1e-5)


def test_decay_that_is_lost_beside_one_adds_up() -> None:
    weights, num_tokens = draw_weights(16, 2), 8
    weights = weights._replace(rate=torch.full_like(weights.rate, 16.0), shift=torch.zeros_like(weights.shift))
    states, products = draw_states(weights), draw_products(weights, num_tokens)
    products.decay.fill_(-15.0)
    products.strength.fill_(-50.0)  # nothing is added
    before = states.state[1].double()
    compute(placed(weights), after := placed(states), placed(products), (num_tokens,), (1,))
    lost = 1 - (after.state[1].double().cpu() / before).mean()
    assert lost.item() == pytest.approx(num_tokens * 16 * math.log1p(math.exp(-15.0)), rel=0.02)


def test_padding_gets_zeros_and_changes_no_state() -> None:
    weights = placed(draw_weights(16, 2))
    states, products = placed(draw_states(weights)), placed(draw_products(weights, 9))
    for each in products:
        each[5:] = torch.nan
    before = DeltaNetStates(*(each.clone() for each in states))
    out = compute(weights, states, products, (4, 1), (2, 3), num_rows=9, num_sequences=4)
    assert not out[5:].any()
    own = DeltaNetStates(*(each.clone() for each in before))
    expected = compute(weights, own, DeltaNetProducts(*(each[:5] for each in products)), (4, 1), (2, 3))
    assert torch.equal(out[:5], expected)
    for found, alone in zip(states, own, strict=True):
        assert torch.equal(found, alone)


def kernels_of(number: str) -> list[Kernel]:
    sizes = {"HEADS": 32, "KEY_HEADS": 16, "KEYS": 128, "VALUES": 128}
    held, places = "*" + number, {"first_rows": "*i64", "slots": "*i64"}
    return [
        Kernel(
            "gpu_delta_net",
            "_prepare",
            {
                **dict.fromkeys(("out", "decays", "strengths", "overlaps", "rates"), "*fp32"),
                **dict.fromkeys(("mixed", "decay", "strength", "columns", "filters", "shifts"), held),
                **places,
                "of_rows": "*i64",
                "kept_slots": "*i64",
            },
            {**sizes, "SIZE": 4, "WIDTH": 128, "num_warps": 1},
        ),
        Kernel(
            "gpu_delta_net",
            "_keep_columns",
            {"columns": held, "mixed": held, **places},
            {"CHANNELS": 8192, "SIZE": 4, "WIDTH": 256, "COLUMNS": 4},
        ),
        Kernel(
            "gpu_delta_net",
            "_apply_rule",
            {
                **dict.fromkeys(("out", "states", "convolved", "decays", "strengths", "overlaps"), "*fp32"),
                **places,
                "kept_slots": "*i64",
            },
            {**sizes, "KEY_WIDTH": 128, "WIDTH": gpu_delta_net.VALUES_AT_ONCE, "num_warps": 1},
        ),
        Kernel(
            "gpu_delta_net",
            "_norm_and_gate",
            {"out": held, "read": "*fp32", "gate": held, "scale": held, "of_rows": "*i64", "eps": "fp32"},
            {"HEADS": 32, "VALUES": 128, "WIDTH": 128, "num_warps": 1},
        ),
    ]


def test_each_kernel_is_compiled_for_gpus_that_are_not_here() -> None:
    assert max(shared_bytes_of({number: kernels_of(number) for number in NUM_BYTES})) <= MAX_SHARED_BYTES
