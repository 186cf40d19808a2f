"""The CPU kernels for the work between matrix products: cpu_kernels.c, cpu_attention.c and cpu_whole_sight.c.

Knows addresses and strides, not models. Callers must check `takes_kernels` or `can_attend` first.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from ctypes import Structure, c_float, c_long, c_void_p

import torch
from torch import Tensor

from keepsight.models.cpu_library import call, has_library, number


class _Norm(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", "hidden", "scale", "residual")),
        *((name, c_long) for name in ("rows", "size")),
        ("eps", c_float),
    )


class _Angles(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("cos", "sin", "positions", "frequencies")),
        *((name, c_long) for name in ("bases", "tokens", "half")),
    )


class AttentionWork(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", "query", "keys", "values", "first_rows", "slots", "begins", "ends")),
        *((name, c_long) for name in ("sequences", "heads", "kv_heads", "dim")),
        *((name, c_long) for name in ("out_stride", "query_stride", "key_stride", "is_paired")),
        ("scale", c_float),
    )


class _WholeSight(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", "query", "keys", "values")),
        *((name, c_long) for name in ("rows", "count", "dim")),
        *((name, c_long) for name in ("out_stride", "query_stride", "key_stride", "is_rounded")),
        ("scale", c_float),
    )


def takes_kernels(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32 and has_library()


def can_attend(query: Tensor, num_kv_heads: int) -> bool:
    """Return whether the attention kernel takes these queries [rows, heads, head_dim]."""
    return takes_kernels(query) and fits_tiles(query.shape[1], num_kv_heads, query.shape[2])


def fits_tiles(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    has_whole_steps = head_dim % number("numbers_at_once") == 0 and head_dim <= number("most_numbers")
    return has_whole_steps and num_heads // num_kv_heads <= number("queries_per_tile")


def norm(hidden: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return hidden / rms(hidden) * scale over the last dimension."""
    out, size = torch.empty_like(hidden), hidden.shape[-1]
    assert hidden.is_contiguous()
    assert scale.shape == (size,)
    assert scale.dtype is torch.float32
    work = _Norm(out.data_ptr(), hidden.data_ptr(), scale.data_ptr(), None, hidden.numel() // size, size, eps)
    call("norm", work)
    return out


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [bases, tokens, 1, 2 * half] of positions times frequencies [bases, half].

    Each half of a row holds all of them; the first half of the sines is negated.
    """
    assert positions.is_contiguous()
    assert frequencies.is_contiguous()
    num_bases, half = frequencies.shape
    cos, sin = frequencies.new_empty(2, num_bases, len(positions), 1, 2 * half)
    tensors = (cos, sin, positions, frequencies)
    call("angles", _Angles(*(each.data_ptr() for each in tensors), num_bases, len(positions), half))
    return cos, sin


class Sight:
    """The positions [begin, end) of its own sequence that each row of a batch sees, and their slots."""

    def __init__(self, lengths: Sequence[int], slots: Sequence[Tensor], begins: Tensor, ends: Tensor) -> None:
        """The rows of a sequence are consecutive.

        `lengths` and `slots` are the row counts and position slots of each sequence; `begins` and `ends` are by row.
        """
        first_rows = torch.tensor([0, *itertools.accumulate(lengths)])
        addresses = torch.tensor([each.data_ptr() for each in slots], dtype=torch.int64)
        self._tensors = (first_rows, addresses, begins, ends)
        # Keeps them alive: the kernel gets only their addresses.
        self._slots = tuple(slots)
        assert all(each.dtype is torch.int64 and each.is_contiguous() for each in (*self._tensors, *self._slots))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Return the attention of queries [rows, heads, head_dim]; only the first dimension may have gaps.

        If keys and values are bfloat16, what they multiply is rounded; callers must then check `multiplies_bfloat16`.
        """
        if out is None:
            out = query.new_empty(query.shape)
        assert all(_has_whole_rows(each) for each in (out, query, keys, values) if len(each))
        assert keys.stride(0) == values.stride(0)
        work = self.arguments(query.shape[1], keys, scale)
        work.out, work.query, work.keys, work.values = (each.data_ptr() for each in (out, query, keys, values))
        work.out_stride, work.query_stride = out.stride(0), query.stride(0)
        call("attend", work)
        return out

    def arguments(self, num_heads: int, keys: Tensor, scale: float) -> AttentionWork:
        """Return the kernel's arguments without the data pointers, for contiguous rows."""
        stride = num_heads * keys.shape[2]
        return AttentionWork(
            *(None,) * 4,
            *(each.data_ptr() for each in self._tensors),
            *(len(self._slots), num_heads, *keys.shape[1:]),
            *(stride, stride, keys.stride(0)),
            keys.dtype is torch.bfloat16,
            scale / math.log(2),  # the kernel computes powers of 2
        )


def _has_whole_rows(heads: Tensor) -> bool:
    """Return whether heads [rows, heads, head_dim] follow each other in a row; torch gives a single one any stride."""
    return heads.stride(2) == 1 and (heads.shape[1] == 1 or heads.stride(1) == heads.shape[2])


def attend_to_all(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor, *, rounds: bool = False
) -> None:
    """Compute attention of rows [rows, head_dim] that see all keys [keys, head_dim]; rows may have gaps between them.

    If `rounds`, everything is multiplied as bfloat16; callers must then check `multiplies_bfloat16`.
    """
    if not number("attends_to_all"):
        if rounds:
            keys, values = keys.bfloat16(), values.bfloat16()
        sight = _whole_sight(len(query), len(keys))
        sight.attend(query[:, None], keys[:, None], values[:, None], scale, out[:, None])
        return
    assert all(each.stride(1) == 1 for each in (query, keys, values, out))
    assert keys.stride() == values.stride()
    tensors, strides = (out, query, keys, values), (each.stride(0) for each in (out, query, keys))
    addresses = (each.data_ptr() for each in tensors)
    call("attend_to_all", _WholeSight(*addresses, len(query), *keys.shape, *strides, rounds, scale / math.log(2)))


@functools.lru_cache(maxsize=16)
def _whole_sight(num_rows: int, num_keys: int) -> Sight:
    """Return a Sight of one sequence in which each row sees every position."""
    whole = torch.full((num_rows,), num_keys)
    return Sight([num_rows], [torch.arange(num_keys)], torch.zeros_like(whole), whole)
