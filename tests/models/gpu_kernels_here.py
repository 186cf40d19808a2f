"""A GPU's kernels; where no GPU is Triton's own interpreter runs them, number by number, on the host's tensors.

What it shows is that they say the right thing, not what a GPU makes of it; it multiplies no bfloat16.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from keepsight.models import cpu_library, gpu_library

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
pytest.importorskip("triton", reason="NO TRITON HERE: the GPU's kernels were not tested")

from keepsight.models import gpu_kernels

__all__ = ["DEVICE", "gpu_kernels", "kernels_in_use"]


@contextmanager
def kernels_in_use() -> Iterator[None]:
    """Whoever asks for a GPU's kernels has them, and has nothing of what else a CPU has."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cpu_library, "_library", lambda: None)
        monkeypatch.setattr(gpu_library._Use, "on", frozenset({DEVICE.type}))
        # Most of a GPU's would find nothing to do here, one after the other.
        monkeypatch.setattr(gpu_kernels, "PROGRAMS_PER_ROW", 4)
        yield
