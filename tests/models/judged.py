"""How many random configurations of each family are compared with transformers, and on which devices."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import Tensor

from keepsight.models import cpu_library
from keepsight.models.vision_language_model import VisionLanguageModel

MAX_ERROR = 1e-4
SEEDS = range(14)
NUM_PICTURES = (0, 1, 3)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
# With kernels, or on a CPU without them.
CASES = [*product(SEEDS, DEVICES, [True]), *product(SEEDS[:4], ["cpu"], [False])]


def name_of_case(case: tuple[int, str, bool]) -> str:
    seed, device, has_kernels = case
    return f"config{seed}-{device}" + ("" if has_kernels else "-without-kernels")


@contextmanager
def judging(*, has_kernels: bool) -> Iterator[None]:
    with torch.inference_mode(), pytest.MonkeyPatch.context() as monkeypatch:
        if not has_kernels:
            monkeypatch.setattr(cpu_library, "_library", lambda: None)
        yield


def assert_close(ours: Tensor, theirs: Tensor, max_error: float = MAX_ERROR) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= max_error


def wanted_shapes(model: VisionLanguageModel, num_zeros: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a checkpoint must have, by our names; all other parameters are zeros."""
    shapes = {slot.name: slot.shape for slot in model.slots()}
    assert sum(each.numel() for each in model.parameters()) == sum(map(math.prod, shapes.values())) + num_zeros
    return shapes
