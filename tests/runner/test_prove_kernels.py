"""Kernels that a GPU's machine has made wrong, or not at all, are not used."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keepsight.models.gpu_library import kernels_for
from keepsight.models.layers import Placement
from keepsight.models.model import Model
from keepsight.runner import prove_kernels as module
from keepsight.runner.prove_kernels import prove_kernels
from tests.models.gpu_kernels_here import DEVICE, gpu_kernels, kernels_in_use
from tests.runner.small_model import SmallModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    with kernels_in_use(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "NUM_TOKENS", (9, 2))
        yield SmallModel(8, directory, Placement(DEVICE, torch.float32)).model


def test_kernels_that_do_what_torch_does_are_used(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with kernels_in_use():
        prove_kernels(model)
        assert kernels_for(DEVICE) is gpu_kernels
    assert not caplog.records


@pytest.mark.parametrize("name", ["norm", "place_heads", "attend_rows"])
@pytest.mark.parametrize("distort", [lambda rows: rows.flip(-1), lambda rows: rows * float("nan")], ids=["flip", "nan"])
def test_a_kernel_with_other_numbers_is_found_out(
    model: Model,
    name: str,
    distort: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = getattr(gpu_kernels, name)

    def wrong(*arguments: Tensor) -> Tensor:
        result: Tensor = right(*arguments)
        result[-1] = distort(result[-1])
        return result

    monkeypatch.setattr(gpu_kernels, name, wrong)
    with kernels_in_use():
        prove_kernels(model)
        assert kernels_for(DEVICE) is None
    assert "the kernels for the GPU are not used" in caplog.text


def test_kernels_that_cannot_be_compiled_are_not_used(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Tensor:
        raise FileNotFoundError("gcc")

    monkeypatch.setattr(gpu_kernels, "place_heads", fail)
    with kernels_in_use():
        prove_kernels(model)
        assert kernels_for(DEVICE) is None
    assert "FileNotFoundError: gcc" in caplog.text


def test_a_gpu_that_a_kernel_has_lost_is_not_asked_again_and_the_way_around_is_told(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu_kernels, "norm", fail)
    with kernels_in_use(), pytest.raises(torch.AcceleratorError):
        prove_kernels(model)
    assert "--enforce-eager" in caplog.text
