"""What a step does between its products, in float32 on a CPU: cpu_kernels.c, compiled when the package is installed.

Where it could not be there is no library, and all of it is torch's.  Knows addresses and strides, nothing of models;
whoever calls has asked `takes_kernels` or `can_attend` before.
"""

import ctypes
import functools
import itertools
import logging
import math
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_long, c_void_p
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Of what torch says that the processor can do.
_BUILDS = {"AVX512": "_cpu_kernels_avx512", "AVX2": "_cpu_kernels_avx2"}


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


class _Heads(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "values", "projected", "scale", "cos", "sin", "slots")),
        *((name, c_long) for name in ("tokens", "heads", "kv_heads", "dim")),
        ("eps", c_float),
    )


class _Attention(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", "query", "keys", "values", "first_rows", "slots", "begins", "ends")),
        *((name, c_long) for name in ("sequences", "heads", "kv_heads", "dim")),
        *((name, c_long) for name in ("out_stride", "query_stride", "key_stride")),
        ("scale", c_float),
    )


_FUNCTIONS = {"norm": _Norm, "angles": _Angles, "place_heads": _Heads, "attend": _Attention}


@functools.cache
def library() -> ctypes.CDLL | None:
    build = _BUILDS.get(torch.backends.cpu.get_cpu_capability(), "_cpu_kernels")
    spec = find_spec(f"keepsight.models.{build}")
    if spec is None or spec.origin is None:
        logger.warning("No kernels for the CPU: there was no compiler when this was installed; torch's are slower")
        return None
    try:
        kernels = ctypes.CDLL(spec.origin)
        for name, work in _FUNCTIONS.items():
            function = getattr(kernels, f"keepsight_{name}")
            function.argtypes, function.restype = [POINTER(work)], None
    except (OSError, AttributeError) as error:
        logger.warning("The kernels for the CPU do not fit here (%s); torch's are slower", error)
        return None
    return kernels


def takes_kernels(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32 and library() is not None


def can_attend(query: Tensor, num_kv_heads: int) -> bool:
    """[rows, heads, head_dim]"""
    _, num_heads, head_dim = query.shape
    if not takes_kernels(query):
        return False
    numbers_at_once, queries_per_tile = _tile()
    return head_dim % numbers_at_once == 0 and num_heads // num_kv_heads <= queries_per_tile


@functools.cache
def _tile() -> tuple[int, int]:
    numbers_at_once, queries_per_tile = (
        c_long.in_dll(_library(), f"keepsight_{name}").value for name in ("numbers_at_once", "queries_per_tile")
    )
    return numbers_at_once, queries_per_tile


def norm(hidden: Tensor, scale: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """hidden / rms(hidden) * scale over the last dimension, and the residual on top."""
    assert hidden.is_contiguous()
    assert residual is None or residual.is_contiguous()
    out, size = torch.empty_like(hidden), hidden.shape[-1]
    under = None if residual is None else residual.data_ptr()
    work = _Norm(out.data_ptr(), hidden.data_ptr(), scale.data_ptr(), under, hidden.numel() // size, size, eps)
    _library().keepsight_norm(work)
    return out


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [bases, tokens, 1, 2 * half] of positions times frequencies [bases, half].

    Each stands twice in a row, and sines are negative the first time.
    """
    assert positions.is_contiguous()
    assert frequencies.is_contiguous()
    num_bases, half = frequencies.shape
    cos, sin = frequencies.new_empty(2, num_bases, len(positions), 1, 2 * half)
    tensors = (cos, sin, positions, frequencies)
    _library().keepsight_angles(_Angles(*(each.data_ptr() for each in tensors), num_bases, len(positions), half))
    return cos, sin


def place_heads(
    projected: Tensor,  # [tokens or more, (heads + 2 * kv_heads) * head_dim]
    scale: Tensor,  # [heads + kv_heads, head_dim]
    eps: float,
    angles: tuple[Tensor, Tensor],  # [tokens, 1, head_dim], sines negative in their first half
    keys: Tensor,  # [slots, kv_heads, head_dim]
    values: Tensor,
    slots: Tensor,  # [tokens]
) -> Tensor:
    """Queries [tokens, heads, head_dim], normalised and rotated as keys are; keys and values are in `slots` then."""
    assert all(each.is_contiguous() for each in (projected, scale, *angles, keys, values, slots))
    num_tokens, (_, num_kv_heads, head_dim) = len(slots), keys.shape
    num_heads = len(scale) - num_kv_heads
    query = projected.new_empty(num_tokens, num_heads, head_dim)
    tensors = (query, keys, values, projected, scale, *angles, slots)
    sizes = (num_tokens, num_heads, num_kv_heads, head_dim)
    _library().keepsight_place_heads(_Heads(*(each.data_ptr() for each in tensors), *sizes, eps))
    return query


class Sight:
    """What each row of a batch sees: positions [begin, end) of its own sequence, and in which slots those lie."""

    def __init__(self, lengths: Sequence[int], slots: Sequence[Tensor], begins: Tensor, ends: Tensor) -> None:
        """Rows of a sequence follow each other; `slots` are those of its positions, `begins` and `ends` of all rows."""
        first_rows = torch.tensor([0, *itertools.accumulate(lengths)])
        addresses = torch.tensor([each.data_ptr() for each in slots], dtype=torch.int64)
        self._told = (first_rows, addresses, begins, ends)
        # Held, as the kernel is given no more than where they lie.
        self._slots = tuple(slots)
        assert all(each.dtype is torch.int64 and each.is_contiguous() for each in (*self._told, *self._slots))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Of queries [rows, heads, head_dim]; numbers of a row or slot lie together, rows and slots may lie apart."""
        if out is None:
            out = query.new_empty(query.shape)
        assert all(each.stride()[1:] == (each.shape[2], 1) for each in (out, query, keys, values) if len(each))
        assert keys.stride(0) == values.stride(0)
        work = _Attention(
            *(each.data_ptr() for each in (out, query, keys, values, *self._told)),
            len(self._slots),
            query.shape[1],
            *keys.shape[1:],
            *(each.stride(0) for each in (out, query, keys)),
            scale / math.log(2),  # whose exponential is a power of 2
        )
        _library().keepsight_attend(work)
        return out


@functools.lru_cache(maxsize=16)
def whole_sight(num_rows: int, num_keys: int) -> Sight:
    """Of one sequence, whose every position each row sees."""
    whole = torch.full((num_rows,), num_keys)
    return Sight([num_rows], [torch.arange(num_keys)], torch.zeros_like(whole), whole)


def _library() -> ctypes.CDLL:
    kernels = library()
    assert kernels is not None
    return kernels
