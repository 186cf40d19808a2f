"""Products with a weight laid out once as MKL's kernels read it, for float32 on a CPU.

From rows every product makes that layout anew, which for up to 64 tokens takes as long as the product itself.  torch
offers packed products to its compiler, for one number of tokens; MKL's layout depends on the weight alone, which
`can_pack` tries on this machine.
"""

import functools

import torch
from torch import Tensor

# What MKL is told to expect.  Thousands make it several times slower for few rows, and one for many.
_EXPECTED_ROWS = 128


def is_exact_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32


@functools.cache
def can_pack() -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    weight = torch.linspace(-1, 1, 96 * 40).view(96, 40)
    packed = pack_rows(weight)
    return all(_is_as_in_rows(weight, packed, num_rows) for num_rows in (1, 2, 7, 64, 129, 300))


def pack_rows(weight: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)  # type: ignore[no-any-return]


def multiply_packed(hidden: Tensor, packed: Tensor, shape_of_weight: Tensor, bias: Tensor | None) -> Tensor:
    """[tokens, in] -> [tokens, out]; of `shape_of_weight` only the shape is read."""
    return torch.ops.mkl._mkl_linear(hidden, packed, shape_of_weight, bias, len(hidden))  # type: ignore[no-any-return]


def _is_as_in_rows(weight: Tensor, packed: Tensor, num_rows: int) -> bool:
    hidden = torch.linspace(-1, 1, num_rows * weight.shape[1]).view(num_rows, -1)
    return torch.allclose(multiply_packed(hidden, packed, weight, None), hidden @ weight.t(), rtol=1e-4, atol=1e-4)
