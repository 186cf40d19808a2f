"""RMS norms are recognized by what they compute, and then computed by our kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepsight.models import cpu_kernels
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.borrowed.norms import replace_norms
from keepsight.models.layers import Placement
from tests.models.borrowed import reference as ref
from tests.models.gpu_kernels_here import DEVICE, gpu_kernels, kernels_in_use

SIZE, EPS = 56, 1e-5


class Norm(nn.Module):
    def __init__(self, weight: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(SIZE) if weight is None else weight), EPS

    def forward(self, hidden: Tensor) -> Tensor:
        return self.normed(hidden) * self.weight

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)


class OnePlusWeight(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        return (self.normed(hidden.float()) * (1 + self.weight.float())).type_as(hidden)


class GatedIfAsked(Norm):
    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden if gate is None else hidden * gate)


class ScaledBefore(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.normed(hidden * self.weight)


class InGroups(Norm):
    def normed(self, hidden: Tensor) -> Tensor:
        return super().normed(hidden.view(*hidden.shape[:-1], 2, -1)).flatten(-2)


class WithoutEpsilon(Norm):
    def normed(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True))


class InDoublePrecision(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).double()


class Gated(Norm):
    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) * gate


class Failing(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        raise KeyError(hidden)


class NoNorm(Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", [Norm, OnePlusWeight, GatedIfAsked])
def test_a_norm_is_computed_by_the_kernel_of_its_device(kind: type[Norm], monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels_in_use():
        module = kind().to(DEVICE)
        hidden = torch.randn(3, 2, 5, SIZE, device=DEVICE).transpose(1, 2)
        expected = module(hidden)
        assert replace_norms(nn.ModuleList([module]), torch.float32) == [module]
        torch.testing.assert_close(module(hidden), expected)
        monkeypatch.setattr(gpu_kernels, "norm", lambda hidden, *_: torch.zeros_like(hidden))
        assert not module(hidden).any()


def test_on_a_cpu_no_row_depends_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_kernels.takes_kernels(hidden := torch.randn(7, SIZE)):
        pytest.skip("NO KERNELS HERE: they were not compiled when keepsight was installed")
    module = Norm()
    expected = module(hidden)
    replace_norms(module, torch.float32)
    torch.testing.assert_close(module(hidden), expected)
    assert torch.equal(torch.cat([module(row[None]) for row in hidden]), module(hidden))
    monkeypatch.setattr(cpu_kernels, "norm", lambda hidden, *_: torch.zeros_like(hidden))
    assert not module(hidden).any()


def test_what_no_kernel_takes_and_further_arguments_are_the_module_s_own_work() -> None:
    module, hidden, gate = GatedIfAsked(), torch.randn(2, SIZE, dtype=torch.float64), torch.randn(SIZE)
    own = [module(hidden), module(hidden.float(), gate), module(hidden.float(), gate=gate)]
    replace_norms(module, torch.float32)
    assert torch.equal(module(hidden), own[0])
    assert torch.equal(module(hidden.float(), gate), own[1])
    assert torch.equal(module(hidden.float(), gate=gate), own[2])


@pytest.mark.parametrize(
    "kind",
    [ScaledBefore, InGroups, WithoutEpsilon, InDoublePrecision, Gated, Failing, NoNorm, lambda: nn.LayerNorm(SIZE)],
)
def test_modules_that_compute_something_else_are_left_alone(kind: Any) -> None:
    module = kind()
    assert replace_norms(module, torch.float32) == []
    assert "forward" not in vars(module)


def test_rounding_to_the_dtype_of_hidden_states_is_no_difference() -> None:
    module = OnePlusWeight(torch.randn(SIZE).bfloat16())
    assert replace_norms(module, torch.bfloat16) == [module]


def test_a_scale_of_all_vectors_is_no_norm() -> None:
    assert replace_norms(NoNorm(torch.tensor([3.0])), torch.float32) == []


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_kernels.takes_kernels(torch.randn(7, SIZE)):
        pytest.skip("NO KERNELS HERE: they were not compiled when keepsight was installed")
    right = cpu_kernels.norm
    monkeypatch.setattr(cpu_kernels, "norm", lambda hidden, scale, eps: right(hidden, scale.flip(0), eps))
    assert replace_norms(Norm(), torch.float32) == []


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_norms_are_recognized_whatever_torch_s_default(set_default_dtype: Callable[[str], None], dtype: str) -> None:
    module = Norm()
    set_default_dtype(dtype)
    assert replace_norms(module, torch.float32) == [module]


def test_norms_are_recognized_whatever_torch_s_default_device() -> None:
    module = Norm()
    with torch.device("meta"):
        assert replace_norms(module, torch.float32) == [module]


@pytest.mark.parametrize(("architecture", "number"), [("Qwen3ForCausalLM", 13), ("OPTForCausalLM", 0)])
def test_all_norms_of_a_decoder_are_found(tmp_path: Path, architecture: str, number: int) -> None:
    ref.make_text_checkpoint(tmp_path, architecture)
    model = BorrowedModel.from_checkpoint(tmp_path, Placement(torch.device("cpu"), torch.float32))
    assert len(model.norms) == number
