"""What is settled when a model is loaded, with a stand-in for the device that is not there."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from keepsight.config import Config
from keepsight.models.layers import Placement
from keepsight.runner import load_runner


@pytest.fixture
def prefers_cudnn() -> Iterator[None]:
    """As torch does by itself."""
    was = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(was)


@pytest.mark.usefixtures("prefers_cudnn")
def test_on_a_gpu_no_kernel_is_planned_anew_for_each_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placement(torch.device("cuda"), torch.bfloat16)
    model = SimpleNamespace(parameters=lambda: iter([torch.empty(10_000_000, device="meta")]))
    monkeypatch.setattr(load_runner, "load_model", lambda *_: model)
    load_runner.load_model_for(Config(), place)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
