"""Builds the low-rank terms of products from an adapter's tensors; refuses adapters with tensors it does not know."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from keepsight.adapter_folder import TENSOR_FILE, AdapterFolder
from keepsight.errors import CheckpointError, NotFiniteError, UnreadableTensorsError
from keepsight.models.adapter_weights import LowRank, stack
from keepsight.models.layers import Placement, name_of

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Product(Protocol):
    """A matrix product that an adapter may change, of one or several outputs."""

    @property
    def in_features(self) -> int: ...

    @property
    def outputs(self) -> Mapping[str, int]: ...


P = TypeVar("P", bound=Product)


def load_adapter(
    folder: AdapterFolder,
    max_rank: int,
    find_output: Callable[[str], tuple[P, str] | None],
    place: Placement,
    adaptable: str,
) -> dict[P, LowRank]:
    """Return what the adapter adds to each product. Raises CheckpointError.

    `find_output`: finds a product and its output by the module's name in checkpoints; None: it cannot be adapted.
    `adaptable`: what can be, for users.
    """
    tensors = _Tensors.of(folder)
    pairs = dict[P, dict[str, tuple[Tensor, Tensor]]]()
    for module in tensors.modules():
        first, found = _names_of(module)[0], find_output(module)
        if found is None:
            raise tensors.refuse(first, f"of this model only {adaptable} can be adapted")
        product, output = found
        its = pairs.setdefault(product, {})
        if output in its:
            raise tensors.refuse(first, "this matrix is also adapted under another name")
        rank = folder.scales.rank_of(module)
        if rank > max_rank:
            raise tensors.refuse(first, f"its rank is {rank}, but max_lora_rank is {max_rank}")
        scale = folder.scales.scale_of(module)
        its[output] = tensors.read(module, rank, product.in_features, product.outputs[output], scale)
    return {product: LowRank(place, *stack(product.outputs, its)) for product, its in pairs.items()}


def _names_of(module: str) -> tuple[str, str]:
    """Return the names of a module's down (A) and up (B) matrices."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


@dataclass(frozen=True, slots=True)
class _Tensors:
    path: Path
    by_name: Mapping[str, Tensor]

    @classmethod
    def of(cls, folder: AdapterFolder) -> "_Tensors":
        path = folder.path / TENSOR_FILE
        try:
            return cls(path, safetensors.torch.load(folder.content))
        except SafetensorError as error:
            raise UnreadableTensorsError(path, f"truncated, or not a safetensors file: {error}") from error
        except KeyError as error:  # raised for dtypes that torch does not have
            raise UnreadableTensorsError(path, f"holds tensors of {error}, which is not supported") from error

    def modules(self) -> list[str]:
        """Return the names of the adapted modules, each of which must have both of its tensors."""
        modules = dict[str, None]()
        for name in sorted(self.by_name):
            if (match := _NAME.fullmatch(name)) is None:
                raise self.refuse(name, "is neither lora_A nor lora_B of a matrix; nothing else is supported")
            if lacking := [each for each in _names_of(match[1]) if each not in self.by_name]:
                raise self.refuse(name, f"{lacking[0]} is missing")
            modules[match[1]] = None
        if not modules:
            raise CheckpointError(self.path, "holds no tensors")
        return list(modules)

    def read(self, module: str, rank: int, inputs: int, outputs: int, scale: float) -> tuple[Tensor, Tensor]:
        down, up = _names_of(module)
        scaled = self._read(up, [outputs, rank]) * scale
        if not scaled.isfinite().all():
            raise self.refuse(up, f"multiplied by its scale, {scale:g}, it overflows")
        return self._read(down, [rank, inputs]), scaled

    def _read(self, name: str, shape: list[int]) -> Tensor:
        tensor = self.by_name[name]
        if list(tensor.shape) != shape:
            raise self.refuse(name, f"its shape is {list(tensor.shape)}, but must be {shape}")
        if tensor.dtype not in _FLOATS:
            raise self.refuse(
                name, f"its type is {name_of(tensor.dtype)}, but must be {', '.join(map(name_of, _FLOATS))}"
            )
        if not tensor.isfinite().all():
            raise NotFiniteError(self.path, name, name_of(tensor.dtype))
        return tensor.float()

    def refuse(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(self.path, f"{name}: {why}")
