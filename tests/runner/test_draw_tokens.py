"""Every filter keeps what transformers keeps, however few tokens of the vocabulary are examined for it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from keepsight.runner.draw_tokens import (
    BLOCK,
    MAX_TOP_K,
    NUM_EXAMINED_FOR_TOP_P,
    SPARE,
    draw_tokens,
    filter_likeliest,
    find_likeliest,
    keep_in_order,
    num_examined,
)
from keepsight.sampling_params import SamplingParams

# Fewer than are examined first; more than with top_k; more than with only top_p.
VOCAB_SIZES = (50, 400, 3000)
LAST_POINT = 1 - 2**-53
TOPK = Tensor.topk


def logits_of(seed: int, rows: int = 1, vocab_size: int = 50) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def keep(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return one row scaled and filtered, each token at its own index."""
    scaled, number = logits / params.temperature, num_examined(params)
    if 0 < number < logits.shape[1]:
        values, ids = find_likeliest(scaled, number)
        filtered, has_more = filter_likeliest(values, ids, scaled, [params])
        if not has_more:
            return torch.full_like(logits, -torch.inf).scatter(1, ids, filtered)
    order, kept = keep_in_order(scaled, [params])
    if params.top_p == 1:
        return order.values
    ids = order.values.sort(descending=True, stable=True).indices
    shares = order.shares.gather(1, ids)
    is_kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, shares.cumsum(-1) - shares < kept)
    return order.values.masked_fill(~is_kept, -torch.inf)


def draw(logits: Tensor, points: list[float], **params: float) -> list[int]:
    return draw_of(logits, points, SamplingParams(**params))  # type: ignore[arg-type]


def draw_of(logits: Tensor, points: list[float], params: SamplingParams) -> list[int]:
    drawn: list[int] = draw_tokens(logits.expand(len(points), -1), [params] * len(points), points).tolist()
    return drawn


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from(VOCAB_SIZES),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 55),
    top_p=st.floats(0.01, 1),
)
@example(seed=0, vocab_size=50, temperature=0.5, top_k=0, top_p=0.9999999999999999)
def test_temperature_top_k_and_top_p_keep_what_transformers_keeps(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = logits_of(seed, vocab_size=vocab_size)
    ours = keep(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    scaled = TemperatureLogitsWarper(temperature)(None, logits)
    ranked = theirs = TopKLogitsWarper(top_k)(None, scaled) if top_k else scaled
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, ranked)
    differing = ours.isfinite() != theirs.isfinite()
    # Where the sum of probabilities equals top_p to the last bit, either side is right.
    assert differing.sum() <= 1
    rest = (ranked.softmax(dim=-1) * (ranked <= ranked[:, differing[0]].T)).sum(dim=-1)
    assert ((rest - (1 - top_p)).abs() < 1e-5).all()
    torch.testing.assert_close(ours[~differing], theirs[~differing])


@pytest.mark.parametrize("top_k", [1, 2, 20, 100])
def test_ties_with_the_last_top_k_token_are_kept_as_by_transformers(top_k: int) -> None:
    for seed in range(5):
        logits = logits_of(seed, vocab_size=400).bfloat16().float()
        theirs = TopKLogitsWarper(top_k)(None, logits)
        assert torch.equal(keep(logits, SamplingParams(top_k=top_k)), theirs)


def test_more_ties_than_are_examined_at_first_are_all_kept() -> None:
    logits = torch.zeros(1, 3 * SPARE)
    logits[0, 7] = 1
    drawn = set(draw(logits, [(step + 0.5) / 5000 for step in range(5000)], top_k=2))
    assert drawn == set(range(3 * SPARE))
    # Ties at -inf do not count: they cannot be drawn.
    logits[0, 8:] = -torch.inf
    assert set(draw(logits, [0.0, 0.999, LAST_POINT], top_k=50)) <= set(range(8))


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.99, 0.9999])
def test_top_p_keeps_what_transformers_keeps_however_many_that_are(top_p: float) -> None:
    num_kept = set[bool]()
    for temperature in (0.3, 1.0, 5.0, 50.0):
        scaled = TemperatureLogitsWarper(temperature)(None, logits_of(7, vocab_size=20 * NUM_EXAMINED_FOR_TOP_P))
        theirs = TopPLogitsWarper(top_p)(None, scaled).isfinite()
        ours = keep(scaled, SamplingParams(top_p=top_p)).isfinite()
        # Sums of rounded numbers: tokens at the edge may stay or go.
        assert scaled.softmax(dim=-1)[ours != theirs].sum() < 1e-6
        num_kept.add(int(ours.sum()) > NUM_EXAMINED_FOR_TOP_P)
    assert num_kept == {False, True}


def test_however_small_top_p_is_the_most_likely_token_stays() -> None:
    logits = logits_of(3)
    kept = keep(logits, SamplingParams(top_p=1e-9)).isfinite()
    assert kept[0].nonzero().tolist() == [[int(logits.argmax())]]
    many = logits_of(3, rows=40)
    drawn = draw_tokens(many, [SamplingParams(top_p=1e-9)] * 40, [LAST_POINT] * 40)
    assert torch.equal(drawn, many.argmax(dim=-1))


@pytest.mark.parametrize("vocab_size", [4, 3000])
def test_a_token_that_begins_exactly_where_top_p_ends_is_cut(vocab_size: int) -> None:
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, -4:] = 0
    assert set(draw(logits, [0.0, 0.4, LAST_POINT], top_p=0.75)) == {vocab_size - 4, vocab_size - 3, vocab_size - 2}


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    logits = logits_of(3)
    theirs = MinPLogitsWarper(min_p)(torch.LongTensor([[0]]), logits)
    torch.testing.assert_close(keep(logits, SamplingParams(min_p=min_p)), theirs)


def test_torch_s_default_precision_filters_nothing_else(set_default_dtype: Callable[[str], None]) -> None:
    logits, params = logits_of(4), SamplingParams(temperature=0.7, top_p=0.9, min_p=0.003)
    expected = keep(logits, params)
    set_default_dtype("bfloat16")
    assert torch.equal(keep(logits, params), expected)


@settings(max_examples=50)
@given(st.integers(0, 1000), st.lists(st.floats(0, LAST_POINT), min_size=11, max_size=11))
def test_a_row_draws_alone_what_it_draws_among_others(seed: int, points: list[float]) -> None:
    params = [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.3, temperature=2.0),
        SamplingParams(),
        SamplingParams(top_k=3, top_p=0.6),
        SamplingParams(top_k=40, min_p=0.01),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=MAX_TOP_K + 1),
        SamplingParams(top_k=MAX_TOP_K + 1, top_p=0.5),
        SamplingParams(top_p=0.9, min_p=1e-4),
        SamplingParams(top_p=0.999, temperature=4.0),
    ]
    logits = logits_of(seed, rows=11, vocab_size=3000).bfloat16().float()
    together = draw_tokens(logits, params, points)
    alone = [draw_tokens(logits[row, None], [params[row]], [points[row]]) for row in range(11)]
    assert torch.equal(together, torch.cat(alone))


def draw_by_sorting(logits: Tensor, params: SamplingParams, points: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from one row the slow way. Also return each point's distance to the nearest token boundary or top-p cut."""
    scaled = logits[0] / params.temperature
    values, ids = scaled.sort(descending=True, stable=True)
    values = values.masked_fill((values - values[0]).exp() < params.min_p, -torch.inf)
    if params.top_k:
        values = values.masked_fill(values < values[min(params.top_k, len(values)) - 1], -torch.inf)
    likely = values.double().softmax(dim=-1)
    rest = likely.flip(0).cumsum(0).flip(0)
    is_kept = rest > (1 - params.top_p if params.top_p < 1 else -1)
    is_kept[0] = True
    ends = likely[is_kept].cumsum(0)
    goals = points * ends[-1]
    margins = torch.minimum((goals[:, None] - ends).abs().amin(dim=1), (rest[1:] - (1 - params.top_p)).abs().amin())
    return ids[is_kept][torch.searchsorted(ends, goals, right=True).clamp(max=len(ends) - 1)], margins


def topk_of_last_equals(values: Tensor, *args: Any, **options: Any) -> Any:
    """Prefer the largest ids among equal values, as torch does on some machines."""
    found = TOPK(values.flip(-1), *args, **options)
    return type(found)((found.values, values.shape[-1] - 1 - found.indices))


@pytest.mark.parametrize("topk", [TOPK, topk_of_last_equals], ids=["here", "elsewhere"])
@settings(max_examples=200)
@example(seed=7, vocab_size=400, temperature=2.0, top_k=0, top_p=0.95, min_p=0.0, shape="whole")
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from(VOCAB_SIZES),
    temperature=st.sampled_from((0.01, 0.3, 1.0, 2.0, 100.0)),
    top_k=st.sampled_from((0, 1, 20, MAX_TOP_K, MAX_TOP_K + 1, 2000)),
    top_p=st.sampled_from((0.1, 0.5, 0.95, 0.999, 1.0)),
    min_p=st.sampled_from((0.0, 0.01, 0.5)),
    shape=st.sampled_from(("float32", "bfloat16", "whole", "partly ruled out")),
)
def test_drawn_tokens_equal_those_of_a_full_sort(
    topk: Callable[..., Any],
    seed: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    shape: str,
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(params.top_k or params.top_p < 1)  # otherwise tokens are drawn in the order of their ids
    logits = logits_of(seed, vocab_size=vocab_size)
    if shape == "bfloat16":
        logits = logits.bfloat16().float()
    elif shape == "whole":
        logits = logits.round()
    elif shape == "partly ruled out":
        logits = logits.masked_fill(logits < 1, -torch.inf)
    points = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    judged, margins = draw_by_sorting(logits, params, points)
    is_clear = margins > 1e-6
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Tensor, "topk", topk)
        drawn = torch.tensor(draw_of(logits, points.tolist(), params))
    assert torch.equal(drawn[is_clear], judged[is_clear])


@pytest.mark.parametrize("vocab_size", [3, BLOCK - 1, BLOCK, BLOCK + 1, 3000])
def test_a_point_selects_the_token_at_that_cumulative_probability(vocab_size: int) -> None:
    logits = logits_of(1, vocab_size=vocab_size)
    ends = logits[0].double().softmax(-1).cumsum(-1).numpy()
    points = np.random.default_rng(0).random(500)
    points = points[np.abs(points[:, None] - ends).min(axis=1) > 1e-5]
    assert draw(logits, points.tolist()) == np.searchsorted(ends, points).tolist()


def test_very_unlikely_tokens_are_drawn_with_their_probability_at_any_index() -> None:
    logits = torch.zeros(1, 2**17)
    logits[0, 0] = 25.0  # all others together: 2e-6
    likely = 1 / (1 + (2**17 - 1) * np.exp(-25))
    drawn = [draw(logits, [likely + (1 - likely) * (step + 0.5) / 16])[0] for step in range(16)]
    expected = [(step + 0.5) / 16 * 2**17 for step in range(16)]
    np.testing.assert_allclose(drawn, expected, rtol=0.01)


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.99}])
def test_excluded_tokens_are_not_drawn_at_either_end(params: dict[str, float]) -> None:
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, 1000:1003] = torch.tensor([0.3, 0.1, 0.2])
    assert set(draw(logits, [0.0, 5e-324, 1e-9, LAST_POINT], **params)) <= {1000, 1001, 1002}


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_rows_of_nan_draw_some_token(params: dict[str, float]) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        [drawn] = draw(torch.full((1, 300), value), [0.5], **params)
        assert 0 <= drawn < 300
