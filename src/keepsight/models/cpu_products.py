"""Matrix products on a CPU: cpu_products.c.

Of float32 as fast as by the best library at hand, of few rows faster, and torch's own take twice as long where the CPU
is not Intel's.  And unlike theirs a row's numbers are the same to the last bit in whatever company it is computed: no
cache and no batch can change an answer.
"""

from ctypes import Structure, c_long, c_void_p
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.cpu_library import call, has_library, number

# As cpu_products.c calls them: a weight of float32, one of bfloat16, and one whose rows are rounded likewise.
_FLOAT32, _BFLOAT16, _BFLOAT16_BY_SAME = range(3)


class _Product(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", "hidden", "weight", "bias", "times")),
        *((name, c_long) for name in ("rows", "inputs", "outputs", "kind", "then_gelu", "is_onto")),
    )


class _Rows(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", "weight", "which")),
        *((name, c_long) for name in ("count", "inputs", "kind")),
    )


def takes_panels(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and has_library()


def rounds_rows() -> bool:
    """Whether this processor multiplies bfloat16 by bfloat16, twice as fast as float32."""
    return has_library() and bool(number("multiplies_bfloat16"))


class Panels:
    """A weight [outputs, inputs] as the kernel reads it; what it multiplies is float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, rounds_rows: bool = False) -> None:
        assert not rounds_rows or weight.dtype is torch.bfloat16
        of_bfloat16 = _BFLOAT16_BY_SAME if rounds_rows else _BFLOAT16
        self._kind: Final = _FLOAT32 if weight.dtype is torch.float32 else of_bfloat16
        self._outputs, self._inputs = weight.shape
        panel, of_step = number("panel"), 1 if self._kind == _FLOAT32 else 2
        num_panels, num_steps = -(-self._outputs // panel), -(-self._inputs // of_step)
        missing = (num_steps * of_step - self._inputs, num_panels * panel - self._outputs)
        if any(missing):
            weight = F.pad(weight, (0, missing[0], 0, missing[1]))
        # Where vectors begin on the cache's lines.
        self._weight = _aligned(weight.view(num_panels, panel, num_steps, of_step).transpose(1, 2))
        self._bias = None
        if bias is not None:
            self._bias = weight.new_zeros(num_panels * panel, dtype=torch.float32)
            self._bias[: self._outputs] = bias

    def multiply(
        self, hidden: Tensor, *, then_gelu: bool = False, times: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor:
        """[..., inputs] -> [..., outputs], with the bias on top.

        GELU (tanh), `times` other numbers and `onto` others, which change, cost next to nothing here.
        """
        assert hidden.dtype is torch.float32
        hidden = hidden.contiguous()
        shape = (*hidden.shape[:-1], self._outputs)
        out = hidden.new_empty(shape) if onto is None else onto
        assert hidden.shape[-1] == self._inputs
        for each in (out, times):
            assert each is None or (each.shape == shape and each.is_contiguous() and each.dtype is torch.float32)
        addresses = (
            None if each is None else each.data_ptr() for each in (out, hidden, self._weight, self._bias, times)
        )
        sizes = (hidden.numel() // self._inputs, self._inputs, self._outputs)
        call("multiply", _Product(*addresses, *sizes, self._kind, then_gelu, onto is not None))
        return out

    def rows(self, which: Tensor) -> Tensor:
        """[count] -> [count, inputs]: what the weight has for some outputs."""
        assert which.dtype is torch.int64
        assert which.dim() == 1
        which = which.contiguous()
        out = torch.empty(len(which), self._inputs, dtype=torch.float32)
        work = _Rows(out.data_ptr(), self._weight.data_ptr(), which.data_ptr(), len(which), self._inputs, self._kind)
        call("take_rows", work)
        return out


def _aligned(tensor: Tensor) -> Tensor:
    room = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
    skipped = -room.data_ptr() % 64 // tensor.itemsize
    return room[skipped : skipped + tensor.numel()].view(tensor.shape).copy_(tensor)
