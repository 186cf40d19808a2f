"""What the GPU's simple kernels compute, written with torch: those that treat each row or token by itself."""

import torch.nn.functional as F
from torch import Tensor

from keepsight.models.layers import ACTIVATIONS


def norm(hidden: Tensor, scale: Tensor, eps: float) -> Tensor:
    return (F.rms_norm(hidden.float(), hidden.shape[-1:], eps=eps) * scale).to(hidden.dtype)


def add_and_norm(
    sums: Tensor, result: Tensor, of_result: Tensor | None, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    added = sums + (result if of_result is None else norm(result, of_result, eps))
    return added, norm(added, scale, eps)


def gate(both: Tensor, activation: str) -> Tensor:
    opening, through = both.chunk(2, dim=1)
    return ACTIVATIONS[activation](opening) * through


def place_heads(
    projected: Tensor,
    scales: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    num_kv_heads, dim = keys.shape[1:]
    num_turned = projected.shape[1] - num_kv_heads
    turned, value = projected[:, :num_turned], projected[:, num_turned:]
    normed = turned if scales is None else norm(turned, scales, eps)
    rotated = normed * cos + normed.roll(dim // 2, dims=-1) * sin
    write_heads(rotated[:, -num_kv_heads:], value, keys, values, slots)
    return rotated[:, :-num_kv_heads].contiguous()


def write_heads(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    is_real = slots >= 0
    keys[slots[is_real]] = key[is_real]
    values[slots[is_real]] = value[is_real]


SIMPLE_KERNELS = (norm, add_and_norm, gate, place_heads, write_heads)
