"""Converts tensors into the arrays that tiers store, and back; on a CPU both share memory, which must not be changed.

Invariant: a tensor comes back bit for bit the same, whatever its device.
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
    """Return a CPU tensor that shares the array's memory."""
    held = np.frombuffer(array.payload, np.uint8)
    # Declared writable, though it is never written to: torch warns of the first read-only memory in a process.
    interface = held.__array_interface__ | {"data": (held.ctypes.data, False)}
    writable = np.asarray(SimpleNamespace(__array_interface__=interface, held=held))
    return torch.from_numpy(writable).view(getattr(torch, array.dtype)).view(array.shape)
