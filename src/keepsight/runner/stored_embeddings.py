"""Embeddings as what tiers keep, and back: on a CPU the very same memory, which nobody changes.

Invariant: what comes back is bit for bit what went, on whatever device.
"""

import warnings

import torch
from torch import Tensor

from keepsight.models.layers import name_of
from keepsight.tiers.tier import StoredArray

# Torch cannot keep others from writing into what came from a tier; nobody does.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def to_stored(embeddings: Tensor, seconds: float) -> StoredArray:
    held = embeddings.cpu().contiguous()
    content = held.view(torch.uint8).flatten().numpy()
    return StoredArray(name_of(held.dtype), tuple(held.shape), content.data, seconds)


def from_stored(array: StoredArray) -> Tensor:
    """On the CPU."""
    return torch.frombuffer(array.payload, dtype=getattr(torch, array.dtype)).view(array.shape)
