"""Decides whether a GPU uses Keepsight's own kernels (`gpu_kernels.py`), which are compiled when first called.

Without them torch's operations compute the same, more slowly.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from keepsight.models.delta_net import DeltaNetProducts, DeltaNetStates, DeltaNetWeights
from keepsight.models.sequence_rows import SequenceRows

logger = logging.getLogger(__name__)


class GpuKernels(Protocol):
    def norm(self, hidden: Tensor, scale: Tensor, eps: float) -> Tensor: ...

    def add_and_norm(
        self, sums: Tensor, result: Tensor, of_result: Tensor | None, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def gate(self, both: Tensor, activation: str) -> Tensor: ...

    def place_heads(
        self,
        projected: Tensor,
        scales: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Tensor: ...

    def write_heads(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None: ...

    def attend_rows(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        ends: Tensor,
        places: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None: ...

    def place_patches(self, projected: Tensor, angles: tuple[Tensor, Tensor] | None, heads: Tensor) -> None: ...

    def attend_to_all(self, heads: Tensor, attended: Tensor, first: int, end: int, size: int, scale: float) -> None: ...

    def rows_per_block(self, query: Tensor, keys: Tensor) -> int: ...

    def attend_slices(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: Tensor,
        blocks: Tensor,
        num_blocks: int,
        longest: int,
        scale: float,
        softcap: float | None,
    ) -> None: ...

    def compute_delta_net(
        self, weights: DeltaNetWeights, states: DeltaNetStates, products: DeltaNetProducts, sequences: SequenceRows
    ) -> Tensor: ...


_NOWHERE: frozenset[str] = frozenset()
_ON_GPUS = frozenset({"cuda"})


class _Use:
    """The process-wide setting: the device types for which kernels are used."""

    on = _ON_GPUS


def use_kernels(is_wanted: bool) -> None:
    """Turn the kernels on or off for the whole process."""
    _Use.on = _ON_GPUS if is_wanted else _NOWHERE


@contextmanager
def without_kernels() -> Iterator[None]:
    before, _Use.on = _Use.on, _NOWHERE
    try:
        yield
    finally:
        _Use.on = before


def kernels_for(device: torch.device) -> GpuKernels | None:
    return _load() if device.type in _Use.on else None


@functools.cache
def _load() -> GpuKernels | None:
    try:
        from keepsight.models import gpu_kernels
    except ImportError as error:
        logger.warning("No kernels for the GPU: Triton is not available (%s); torch's operations are slower", error)
        return None
    return gpu_kernels
