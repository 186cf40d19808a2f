"""A row's numbers become the nearest multiples of a 127th of its largest, whatever other rows contain."""

import pytest
import torch
from torch import Tensor

from keepsight.models import quantize_rows as module
from keepsight.models.quantize_rows import quantize_rows


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    whole, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(rows.shape[:-1])
    quantize_rows(whole, scales, rows)
    return whole, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_is_no_further_from_its_own_than_half_a_step(dtype: torch.dtype) -> None:
    rows = (torch.randn(40, 65) * torch.logspace(-20, 20, 40)[:, None]).to(dtype)
    whole, scales = quantized(rows)
    off = (whole * scales[:, None].double() - rows.double()).abs()
    assert (off <= 0.5001 * scales[:, None]).all()
    assert (whole.abs().amax(dim=1) == 127).all()
    assert torch.equal(scales, rows.float().abs().amax(dim=1) / 127)


def test_ties_round_to_the_even_number() -> None:
    whole, _ = quantized(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]]))
    assert whole.tolist() == [[127, 0, 2, 2, 0, -2, -127]]


def test_a_row_of_zeros_stays_one_and_the_smallest_numbers_do_not_overflow() -> None:
    whole, scales = quantized(torch.tensor([[0.0, -0.0], [1e-45, -1e-45], [1e-43, 1e-45], [3.4e38, -3.4e38]]))
    assert (scales * 1.0).isfinite().all()
    assert whole.tolist()[0] == [0, 0]
    assert whole.abs().max() <= 127


def test_nan_shows_only_in_its_row_s_scale() -> None:
    rows = torch.ones(4, 3)
    rows[1, 2], rows[3, 0] = torch.nan, -torch.inf
    assert quantized(rows)[1].isfinite().tolist() == [True, False, True, False]


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5), (0, 5)])
def test_however_many_are_widened_at_once_they_are_the_same(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(shape)
    expected = quantized(rows)
    monkeypatch.setattr(module, "_NUMBERS_AT_ONCE", 11)
    for ours, theirs in zip(quantized(rows), expected, strict=True):
        assert torch.equal(ours, theirs)
