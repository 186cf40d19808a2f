"""Tensors as what tiers keep, and back: on a CPU the very same memory, which nobody changes.

Invariant: what comes back is bit for bit what went, on whatever device.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from keepsight.models.layers import name_of
from keepsight.tiers.tier import StoredArray


def to_stored(tensor: Tensor, seconds: float) -> StoredArray:
    held = tensor.cpu().contiguous()
    content = held.view(torch.uint8).flatten().numpy()
    return StoredArray(name_of(held.dtype), tuple(held.shape), content.data, seconds)


def from_stored(array: StoredArray) -> Tensor:
    """On the CPU."""
    held = np.frombuffer(array.payload, np.uint8)
    # Said to be writable, and nobody writes: of other memory torch warns, of whichever comes first in a process.
    told = held.__array_interface__ | {"data": (held.ctypes.data, False)}
    writable = np.asarray(SimpleNamespace(__array_interface__=told, held=held))
    return torch.from_numpy(writable).view(getattr(torch, array.dtype)).view(array.shape)
