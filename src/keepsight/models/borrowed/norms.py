"""RMS norms of transformers' modules by our kernels: one operation instead of eight, each a launch on a GPU.

Knows no class: a module with one vector of weights is such a norm if it computes what one would. Its scale is
observed, as some classes add one to their weights.
"""

import inspect
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models.gpu_library import without_kernels
from keepsight.models.layers import norm_by_kernel
from keepsight.models.row_differences import row_differences

_NAMES_OF_EPS = ("variance_epsilon", "eps")
# A power of two beside whose square any epsilon is lost: a vector of it is normed to ones.
_LARGE = 2.0**20
# Sizes of the vectors that are tried; epsilon matters to the smallest.
_SIZES = (1e-3, 0.1, 1.0, 30.0)
# Groups can be told from a whole only if there are some numbers.
_LEAST_SIZE = 8
# The parts of such a vector differ in size by up to this factor, so a norm over groups of its numbers gives others.
_RAMP = 30.0
# Of a normed vector, relative to it. Rounding to bfloat16 twice, as some classes do, changes 0.004.
_MAX_DIFFERENCE, _MAX_DIFFERENCE_ROUNDED = 1e-5, 0.02


class _Norm(NamedTuple):
    scale: Tensor
    eps: float

    def by_kernel(self, hidden: Tensor) -> Tensor | None:
        """Return None if there is no kernel for it, or none is wanted."""
        return norm_by_kernel(hidden, self.scale, self.eps) if hidden.shape[-1:] == self.scale.shape else None


@torch.inference_mode()
def replace_norms(modules: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """Make norms call our kernels, for hidden states of this dtype or in float32. Return their modules."""
    replaced = []
    with without_kernels():  # those of a GPU are verified later
        for module in modules.modules():
            if (norm := _observe(module, dtype)) is not None:
                _replace(module, norm)
                replaced.append(module)
    return replaced


def _observe(module: Any, dtype: torch.dtype) -> _Norm | None:
    eps = next((getattr(module, name) for name in _NAMES_OF_EPS if hasattr(module, name)), None)
    if not isinstance(eps, float) or not _takes_one_tensor(module):
        return None
    weights = list(module.parameters())
    if len(weights) != 1 or weights[0].dim() != 1 or len(weights[0]) < _LEAST_SIZE:
        return None
    vectors = _draw_vectors(len(weights[0])).to(weights[0].device)
    try:
        norm = _Norm(module(torch.full_like(vectors[0], _LARGE)).contiguous(), eps)
        if norm.scale.dtype is not torch.float32 or not _computes(module, norm, vectors, _MAX_DIFFERENCE):
            return None
        return norm if _computes(module, norm, vectors.to(dtype), _MAX_DIFFERENCE_ROUNDED) else None
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except Exception:  # a module of another kind may raise anything
        return None


def _draw_vectors(size: int) -> Tensor:
    # Whatever torch's default dtype and device are.
    make = partial(torch.tensor, dtype=torch.float32, device="cpu")
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(size, generator=random, dtype=torch.float32, device="cpu")
    ramp = make(_RAMP) ** torch.linspace(0, 1, size, dtype=torch.float32, device="cpu")
    return torch.outer(make(_SIZES), drawn * ramp)


def _takes_one_tensor(module: Any) -> bool:
    taken = inspect.signature(module.forward).parameters.values()
    return sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in taken) == 1


def _computes(module: Any, norm: _Norm, vectors: Tensor, max_difference: float) -> bool:
    """Return whether the module computes the norm, and so does its kernel."""
    expected = F.rms_norm(vectors.float(), norm.scale.shape, norm.scale, norm.eps)
    found, by_kernel = module(vectors), norm.by_kernel(vectors)
    computed = [found] if by_kernel is None else [found, by_kernel]
    return all(
        each.dtype is vectors.dtype and bool(row_differences(each, expected).max() < max_difference)
        for each in computed
    )


def _replace(module: Any, norm: _Norm) -> None:
    forward = module.forward

    def replaced(hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        found = None if others or named else norm.by_kernel(hidden)
        return forward(hidden, *others, **named) if found is None else found

    module.forward = replaced
