"""Matrix products on a CPU: cpu_products.c.

Products of float32 are as fast as those of the best available library, and faster for few rows; torch's take twice as
long on CPUs other than Intel's. Unlike theirs, a row's results are the same to the last bit whatever else is in the
batch: neither caching nor batching can change an answer.
"""

from ctypes import Structure, c_long, c_void_p
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.cpu_library import call, has_library, number

# In the order of cpu_products.h: dtype of a weight, and whether the rows that it multiplies are rounded to bfloat16.
_KINDS = (
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.bfloat16, True),
    (torch.int8, False),
    (torch.int8, True),
)
_BYTES_OF_STEP = 4  # per output
# In the order of cpu_activations.h, by their names in checkpoints.
_ACTIVATIONS = (None, "gelu_pytorch_tanh", "gelu", "silu")


class ProductWork(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", "hidden", "weight", "scales", "bias", "times")),
        *((name, c_long) for name in ("rows", "inputs", "outputs", "kind", "activation", "is_onto")),
    )


class _Rows(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", "weight", "scales", "which")),
        *((name, c_long) for name in ("count", "inputs", "kind")),
    )


def takes_panels(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and (weight.dtype, False) in _KINDS and has_library()


def multiplies_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 by bfloat16."""
    return has_library() and bool(number("multiplies_bfloat16"))


def gains_by_rounding() -> bool:
    """Return whether it multiplies many rows faster if they are rounded to bfloat16; Intel's need tiles (AMX)."""
    return has_library() and bool(number("gains_by_rounding"))


class Panels:
    """A weight [outputs, inputs] in the layout that the kernel reads; its inputs are float32.

    `scales`: for int8, the factor of each output's row.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, scales: Tensor | None = None, rounds_rows: bool = False
    ) -> None:
        assert (scales is not None) == (weight.dtype is torch.int8)
        self._kind: Final = _KINDS.index((weight.dtype, rounds_rows))
        self.num_outputs, self.num_inputs = weight.shape
        assert self.num_inputs > 0, "the kernels divide by this"
        panel, of_step = number("panel"), _BYTES_OF_STEP // weight.itemsize
        num_panels, num_steps = -(-self.num_outputs // panel), -(-self.num_inputs // of_step)
        missing = (num_steps * of_step - self.num_inputs, num_panels * panel - self.num_outputs)
        if any(missing):
            weight = F.pad(weight, (0, missing[0], 0, missing[1]))
        # Aligned, so that vectors begin at cache lines.
        self._weight = _aligned(weight.view(num_panels, panel, num_steps, of_step).transpose(1, 2))
        of_each = num_panels * panel
        self._scales, self._bias = (None if each is None else _padded(each, of_each) for each in (scales, bias))

    def multiply(self, hidden: Tensor, *, activation: str | None = None, onto: Tensor | None = None) -> Tensor:
        """[..., inputs] -> [..., outputs], with the bias added.

        Applying an activation, or adding to `onto` in place, costs next to nothing here.
        """
        assert hidden.dtype is torch.float32
        hidden = hidden.contiguous()
        shape = (*hidden.shape[:-1], self.num_outputs)
        out = hidden.new_empty(shape) if onto is None else onto
        assert hidden.shape[-1] == self.num_inputs
        assert out.shape == shape
        assert out.is_contiguous()
        assert out.dtype is torch.float32
        work = self.arguments(activation)
        work.out, work.hidden, work.rows = out.data_ptr(), hidden.data_ptr(), hidden.numel() // self.num_inputs
        work.is_onto = onto is not None
        call("multiply", work)
        return out

    def arguments(self, activation: str | None = None) -> ProductWork:
        """Return the kernel's arguments without its input and output."""
        which = _ACTIVATIONS.index(activation)
        read = (None if each is None else each.data_ptr() for each in (self._weight, self._scales, self._bias))
        sizes = (0, self.num_inputs, self.num_outputs)
        return ProductWork(None, None, *read, None, *sizes, self._kind, which)

    def rows(self, which: Tensor) -> Tensor:
        """[count] -> [count, inputs]: return the weight's rows of some outputs.

        The caller must know that there are such outputs: the kernel reads wherever `which` leads.
        """
        assert which.dtype is torch.int64
        assert which.dim() == 1
        which = which.contiguous()
        out = torch.empty(len(which), self.num_inputs, dtype=torch.float32)
        read = (None if each is None else each.data_ptr() for each in (self._weight, self._scales, which))
        call("take_rows", _Rows(out.data_ptr(), *read, len(which), self.num_inputs, self._kind))
        return out


def _padded(numbers: Tensor, size: int) -> Tensor:
    """Return one number per output, as float32, padded with zeros to `size`."""
    padded = numbers.new_zeros(size, dtype=torch.float32)
    padded[: len(numbers)] = numbers
    return padded


def _aligned(tensor: Tensor) -> Tensor:
    room = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
    skipped = -room.data_ptr() % 64 // tensor.itemsize
    return room[skipped : skipped + tensor.numel()].view(tensor.shape).copy_(tensor)
