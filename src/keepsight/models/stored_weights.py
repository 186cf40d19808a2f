"""The forms in which files store a weight: one tensor, a tensor with its scales, or several packed tensors.

Each reports its mismatches before anything is read, and reads as the complete weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError
from torch import Tensor

from keepsight.errors import CheckpointError, TensorMismatchError, UnreadableTensorsError
from keepsight.models.layers import WeightSlot
from keepsight.models.packed_weights import Packing
from keepsight.models.quantized_checkpoint import QUANTIZED_DTYPES, SCALE_OF_ROWS, SUFFIXES, dequantize, fits_scales


@dataclass(frozen=True, slots=True)
class StoredTensor:
    path: Path
    file: Any
    name: str  # in the file

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return str(self.file.get_slice(self.name).get_dtype())

    def read(self) -> Tensor:
        try:
            return self.file.get_tensor(self.name)  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise UnreadableTensorsError(self.path, f"{self.name}: {error}") from error


class Misfits(NamedTuple):
    """Mismatches to report, of the tensors of one weight or of many."""

    missing: Sequence[str] = ()
    misshapen: Sequence[str] = ()
    mistyped: Sequence[str] = ()


class StoredWeight(Protocol):
    @property
    def tensor(self) -> StoredTensor:
        """The tensor that holds its values."""
        ...

    def misfits(self, slot: WeightSlot) -> Misfits: ...

    def read(self, slot: WeightSlot) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class WholeWeight:
    tensor: StoredTensor

    def misfits(self, slot: WeightSlot) -> Misfits:
        dtype = self.tensor.dtype
        is_float = dtype not in QUANTIZED_DTYPES and dtype.startswith(("F", "BF"))
        mistyped = [] if is_float else [_dtype_misfit(self.tensor, "a float")]
        return Misfits(misshapen=_shape_misfits(self.tensor, slot), mistyped=mistyped)

    def read(self, slot: WeightSlot) -> Tensor:
        return self.tensor.read()


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    tensor: StoredTensor
    scales: StoredTensor

    def misfits(self, slot: WeightSlot) -> Misfits:
        shape, of_scales = self.tensor.shape, self.scales.shape
        misshapen = _shape_misfits(self.tensor, slot)
        if not fits_scales(shape, of_scales):
            misshapen.append(f"{self.scales.name} (is {list(of_scales)}, of a weight of {list(shape)})")
        return Misfits(misshapen=misshapen)

    def read(self, slot: WeightSlot) -> Tensor:
        return dequantize(self.tensor.read(), self.scales.read())


@dataclass(frozen=True, slots=True)
class PackedWeight:
    tensor: StoredTensor
    # By their names in the packing.
    tensors: Mapping[str, StoredTensor]
    packing: Packing

    def misfits(self, slot: WeightSlot) -> Misfits:
        if len(slot.shape) != 2:
            return Misfits(misshapen=[f"{self.tensor.name} (is packed, must be {list(slot.shape)})"])
        prefix = self.tensor.name.removesuffix(self.packing.names.numbers)
        parts = self.packing.parts(*slot.shape)
        both = [(each, parts[name]) for name, each in self.tensors.items()]
        return Misfits(
            [prefix + name for name, part in parts.items() if part.is_needed and name not in self.tensors],
            [
                f"{each.name} (is {list(each.shape)}, must be {list(part.shape)})"
                for each, part in both
                if each.shape != part.shape
            ],
            [_dtype_misfit(each, " or ".join(part.dtypes)) for each, part in both if each.dtype not in part.dtypes],
        )

    def read(self, slot: WeightSlot) -> Tensor:
        outputs, inputs = slot.shape
        tensors = {name: each.read() for name, each in self.tensors.items()}
        self._check(tensors, outputs, inputs)
        return self.packing.make_whole(tensors, outputs, inputs)

    def _check(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> None:
        """Check what can only be seen in the tensors' values."""
        names = self.packing.names
        shape = tensors.get(names.shape)
        if shape is not None and shape.tolist() != [outputs, inputs]:
            raise self._refuse(names.shape, f"says {shape.tolist()}, must say {[outputs, inputs]}")
        groups, count = tensors.get(names.groups), self.packing.count_groups(inputs)
        if groups is not None and not 0 <= int(groups.min()) <= int(groups.max()) < count:
            raise self._refuse(names.groups, f"names groups beyond the {count} that exist")

    def _refuse(self, name: str, reason: str) -> CheckpointError:
        tensor = self.tensors[name]
        return CheckpointError(tensor.path, f"{tensor.name} {reason}")


def _shape_misfits(tensor: StoredTensor, slot: WeightSlot) -> list[str]:
    """Return a message if the shape does not fit, otherwise nothing."""
    shape = tensor.shape
    return [] if slot.takes(shape) else [f"{tensor.name} (is {list(shape)}, must be {list(slot.shape)})"]


def _dtype_misfit(tensor: StoredTensor, wanted: str) -> str:
    return f"{tensor.path.name}: {tensor.name} (is {tensor.dtype}, must be {wanted})"


def gather(stored: Mapping[str, StoredTensor], packing: Packing | None) -> dict[str, StoredWeight]:
    """Return weights by name; tensors that belong to a quantized weight are part of it, not weights themselves."""
    whole, packed = dict(stored), dict[str, StoredWeight]()
    if packing is not None:
        suffix = f".{packing.names.numbers}"
        for prefix in [name.removesuffix(packing.names.numbers) for name in stored if name.endswith(suffix)]:
            tensors = {name: whole.pop(prefix + name) for name in packing.names if name and prefix + name in whole}
            tensor = tensors[packing.names.numbers]
            if twin := whole.get(f"{prefix}weight"):
                raise TensorMismatchError(tensor.path.parent, surplus=[f"{tensor.name} (also stored as {twin.name})"])
            packed[f"{prefix}weight"] = PackedWeight(tensor, tensors, packing)
    return _with_scales(whole) | packed


def _with_scales(stored: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
    scales = {
        name: next((scales for suffix in SUFFIXES if (scales := stored.get(name + suffix))), None)
        for name, tensor in stored.items()
        if tensor.dtype in QUANTIZED_DTYPES
    }
    of_others = {name + suffix for name in scales for suffix in SUFFIXES}
    of_others |= {name.removesuffix("weight") + SCALE_OF_ROWS for name in scales}
    return {
        name: ScaledWeight(tensor, its_scales) if (its_scales := scales.get(name)) else WholeWeight(tensor)
        for name, tensor in stored.items()
        if name not in of_others
    }
