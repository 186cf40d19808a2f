"""With less precision, what rounding changes is no reason to refuse a model; what ignoring a window changes is."""

from pathlib import Path

import pytest
import torch

from keepsight.errors import CheckpointError
from keepsight.models.attention import View
from keepsight.models.borrowed import attention, prove
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.layers import Placement
from tests.models.borrowed import reference as ref

ROUNDED = Placement(torch.device("cpu"), torch.bfloat16)


@pytest.fixture
def nothing_is_allowed_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "MAX_DIFFERENCE_ROUNDED", 1e-6)


@pytest.mark.usefixtures("nothing_is_allowed_to_rounding")
def test_a_mixture_may_differ_as_much_as_by_noise_in_its_embeddings(tmp_path: Path) -> None:
    ref.make_text_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    BorrowedModel.from_checkpoint(tmp_path, ROUNDED)


@pytest.mark.usefixtures("nothing_is_allowed_to_rounding")
def test_a_mixture_that_differs_by_more_than_any_noise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref.make_text_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    compute = prove._compute_in_parts
    monkeypatch.setattr(prove, "_compute_in_parts", lambda *arguments: compute(*arguments).flip(0))
    with pytest.raises(CheckpointError, match=r"they differ by \d+"):
        BorrowedModel.from_checkpoint(tmp_path, ROUNDED)


@pytest.mark.usefixtures("nothing_is_allowed_to_rounding")
def test_a_model_without_experts_may_not(tmp_path: Path) -> None:
    ref.make_text_checkpoint(tmp_path, "LlamaForCausalLM")
    with pytest.raises(CheckpointError, match=r"they differ by \d\.\d%"):
        BorrowedModel.from_checkpoint(tmp_path, ROUNDED)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Gemma4ForCausalLM"])
def test_a_model_whose_windows_are_ignored_is_refused(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref.make_text_checkpoint(tmp_path, architecture)
    BorrowedModel.from_checkpoint(tmp_path, ROUNDED)
    monkeypatch.setattr(attention, "View", lambda _window, is_causal: View(None, is_causal))
    with pytest.raises(CheckpointError, match=r"they differ by \d+"):
        BorrowedModel.from_checkpoint(tmp_path, ROUNDED)
