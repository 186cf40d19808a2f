"""Matrix products on a CPU, by oneDNN: of float32 torch's own, by MKL, take twice as long where the CPU is not Intel's,
and of bfloat16 torch lays out the weight anew for each product, up to twice as long for a few tokens.

A weight is laid out once as the kernels read it; from rows every product makes that layout anew, which for a few tokens
takes as long as the product itself.  Kernels are made for one number of rows and kept, so that a prompt's length is
rounded up: made anew for every length they would cost a short prompt as much as its products.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN chooses a layout for as many; it serves any number.
_EXPECTED_ROWS = 128
# Of 4, prompts of 20 to 40 tokens would take 4 % less, and twice as many kernels.  What is longer than so many parts is
# rounded to larger ones: a kernel takes a millisecond to make and 200 KiB to keep, and most lengths come once.
_ROWS_ROUNDED_TO, _MOST_PARTS = 8, 32
# How far they may be from torch's.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def takes_products(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and _has_products(tensor.dtype)


@functools.cache
def _has_products(dtype: torch.dtype) -> bool:
    """Tried on this machine: torch offers them to its compiler, and not in every build."""
    if dtype not in _TOLERANCES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.linspace(-1, 1, 96 * 40).view(96, 40).to(dtype)
    try:
        # Without the instructions oneDNN takes bfloat16 too, number by number.
        is_fast = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return is_fast and all(_is_as_by_torch(weight, num_rows) for num_rows in (1, 2, 7, 64, 129, 300))
    except (AttributeError, RuntimeError):
        return False


def pack(weight: Tensor) -> Tensor:
    """[out, in], which only `multiply` can read."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)  # type: ignore[no-any-return]


def multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, then_gelu: bool = False) -> Tensor:
    """[..., in] by a weight [out, in], packed or as it lies -> [..., out]; GELU (tanh) costs nothing here."""
    operation, variant = ("gelu", "tanh") if then_gelu else ("none", "")
    return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, operation, [], variant)  # type: ignore[no-any-return]


def pad_rows(hidden: Tensor) -> Tensor:
    """[rows, size], with rows of zeros up to a number that kernels are made for."""
    step = _ROWS_ROUNDED_TO
    while len(hidden) > step * _MOST_PARTS:
        step *= 2
    missing = -len(hidden) % step
    if not missing or len(hidden) < _ROWS_ROUNDED_TO or not takes_products(hidden):
        return hidden
    return F.pad(hidden, (0, 0, 0, missing))


def _is_as_by_torch(weight: Tensor, num_rows: int) -> bool:
    hidden = torch.linspace(-1, 1, num_rows * weight.shape[1]).view(num_rows, -1).to(weight.dtype)
    expected, tolerance = hidden @ weight.t(), _TOLERANCES[weight.dtype]
    return all(
        torch.allclose(multiply(hidden, each), expected, rtol=tolerance, atol=tolerance)
        for each in (weight, pack(weight))
    )
