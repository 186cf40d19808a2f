"""From safetensors files to a model's parameters, with every tensor on both sides accounted for.

Names, shapes and types are compared before anything is read, so that a wrong checkpoint fails with the whole list.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from keepsight.errors import (
    CheckpointConfigError,
    CheckpointError,
    ModelTooLargeError,
    NotFiniteError,
    TensorMismatchError,
    UnreadableTensorsError,
    UntiedTensorsError,
)
from keepsight.json_fields import JsonFields
from keepsight.models.layers import WeightSlot, name_of
from keepsight.models.quantized_checkpoint import QUANTIZED_DTYPES, SCALE_OF_ROWS, SUFFIXES, dequantize, fits_scales

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# By what most weights are kept in, and where.
_TO_TAKE_LESS = {
    ("cpu", torch.float32): "--dtype bfloat16 takes half",
    ("cuda", torch.float32): "--dtype bfloat16 takes half",
    ("cpu", torch.bfloat16): "--quantization int8 takes about half",
}


def load_weights(
    directory: Path,
    slots: Iterable[WeightSlot],
    canonical_name: Callable[[str], str],
    is_never_read: Callable[[str], bool],
    copies: Mapping[str, str],
    room: int | None = None,
) -> None:
    """`copies`: what stands for another tensor, whose name is the value; refused where it is not the same.

    `room`: bytes of memory that may be filled.
    """
    wanted = {slot.name: slot for slot in slots}
    found = _find_tensors(directory, canonical_name)
    to_read = {name: tensor for name, tensor in found.items() if not is_never_read(name)}
    to_compare = {copy: wanted[original] for copy, original in copies.items() if copy in to_read}
    _account(directory, wanted | to_compare, to_read)
    if room is not None:
        _check_room(directory, wanted.values(), room)
    for copy in to_compare:
        original = copies[copy]
        if not _are_equal(found[copy].read(), found[original].read()):
            raise UntiedTensorsError(directory, found[copy].name, found[original].name)
    for name, tensor in found.items():
        if slot := wanted.get(name):
            slot.fill(tensor.read())
            # Where it is used, and in that precision, which may be too small for it.
            if not _is_finite(slot.digits):
                raise NotFiniteError(tensor.path, tensor.name, name_of(slot.digits.dtype))


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    path: Path
    file: Any
    name: str  # as the file calls it
    scales: "_StoredTensor | None" = None  # where it is quantized

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return str(self.file.get_slice(self.name).get_dtype())

    def read(self) -> Tensor:
        try:
            tensor: Tensor = self.file.get_tensor(self.name)
        except SafetensorError as error:
            raise UnreadableTensorsError(self.path, f"{self.name}: {error}") from error
        return tensor if self.scales is None else dequantize(tensor, self.scales.read())


def _find_tensors(directory: Path, canonical_name: Callable[[str], str]) -> dict[str, _StoredTensor]:
    found: dict[str, _StoredTensor] = {}
    for path in weight_files(directory):
        file = _open(path)
        for stored in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            name = canonical_name(stored)
            if name in found:
                raise TensorMismatchError(directory, surplus=[f"{stored} (also stored as {found[name].name})"])
            found[name] = _StoredTensor(path, file, stored)
    return _with_scales(found)


def _with_scales(found: dict[str, _StoredTensor]) -> dict[str, _StoredTensor]:
    """Those of quantized weights are no tensors of their own."""
    quantized = {}
    for name, tensor in found.items():
        if tensor.dtype in QUANTIZED_DTYPES:
            scales = (scales for suffix in SUFFIXES if (scales := found.get(name + suffix)))
            quantized[name] = replace(tensor, scales=next(scales, None))
    of_others = {name + suffix for name in quantized for suffix in SUFFIXES}
    of_others |= {name.removesuffix("weight") + SCALE_OF_ROWS for name in quantized}
    return {name: quantized.get(name, tensor) for name, tensor in found.items() if name not in of_others}


def weight_files(directory: Path) -> list[Path]:
    """The single file where there is one, as in transformers: an index beside it was left by an earlier save."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() or not index.exists():
        return [single]
    names = JsonFields.read(index).section("weight_map").values()
    # The index is data: it must not lead out of the checkpoint's folder.
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointConfigError(index, "weight_map: must name the files of this folder that hold the tensors")
    return [directory / name for name in sorted(set(names))]


def stored_dtypes(directory: Path) -> set[str]:
    """Of all its tensors, as safetensors calls them."""
    files = [_open(path) for path in weight_files(directory)]
    return {file.get_slice(name).get_dtype() for file in files for name in file.keys()}  # noqa: SIM118


def _open(path: Path) -> Any:
    try:
        path.open("rb").close()  # safe_open takes whatever it may not open for missing
    except FileNotFoundError:
        raise CheckpointError(path, "no such file") from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UnreadableTensorsError(path, f"truncated, or not a safetensors file: {error}") from error
    except (RuntimeError, MemoryError) as error:  # torch's word, and safetensors'
        told = f"its {path.stat().st_size / 2**30:.1f} GiB cannot be mapped into memory: {error}"
        raise CheckpointError(path, told) from error


def _check_room(directory: Path, slots: Iterable[WeightSlot], room: int) -> None:
    num_bytes = Counter[tuple[str, torch.dtype]]()
    for slot in slots:
        num_bytes[slot.target.device.type, slot.target.dtype] += slot.target.nbytes
    if num_bytes.total() > room:
        [(most, _)] = num_bytes.most_common(1)
        raise ModelTooLargeError(directory, num_bytes.total(), room, name_of(most[1]), _TO_TAKE_LESS.get(most))


def _is_finite(tensor: Tensor) -> bool:
    """By its extremes, of which NaN is one: looking at each number by itself takes ten times as long."""
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def _are_equal(copy: Tensor, original: Tensor) -> bool:
    """A copy may be kept in another precision."""
    return torch.equal(copy, original.to(copy.dtype)) or torch.equal(copy.to(original.dtype), original)


def _account(directory: Path, wanted: dict[str, WeightSlot], found: dict[str, _StoredTensor]) -> None:
    missing = sorted(wanted.keys() - found.keys())
    surplus = sorted(found[name].name for name in found.keys() - wanted.keys())
    both = [(found[name], wanted[name]) for name in sorted(found.keys() & wanted.keys())]
    misshapen = [
        f"{tensor.name} (is {list(tensor.shape)}, must be {list(slot.shape)})"
        for tensor, slot in both
        if not slot.takes(tensor.shape)
    ]
    misshapen += [
        f"{scales.name} (is {list(scales.shape)}, of a weight of {list(tensor.shape)})"
        for tensor, _ in both
        if (scales := tensor.scales) and not fits_scales(tensor.shape, scales.shape)
    ]
    mistyped = [
        f"{tensor.path.name}: {tensor.name} (is {tensor.dtype}, must be a float)"
        for tensor, _ in both
        if not tensor.scales and (tensor.dtype in QUANTIZED_DTYPES or not tensor.dtype.startswith(("F", "BF")))
    ]
    if missing or surplus or misshapen or mistyped:
        raise TensorMismatchError(directory, missing, surplus, misshapen, mistyped)
