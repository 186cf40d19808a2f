"""Loads a model's parameters from safetensors files, with every tensor on both sides accounted for.

Names, shapes and dtypes are compared before anything is read, so a wrong checkpoint fails with the complete list.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain, takewhile
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
from keepsight.models.quantized_checkpoint import read_packing
from keepsight.models.stored_weights import PackedWeight, StoredTensor, StoredWeight, gather

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Advice by the device and dtype of most of the weights.
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
    room: int | None,
) -> None:
    """Fill the slots from the checkpoint in `directory`.

    `copies`: tensors that duplicate the tensor named by the value; refused if they differ. `room`: bytes of memory
    that may be filled.
    """
    wanted = {slot.name: slot for slot in slots}
    packing = read_packing(JsonFields.read(directory / "config.json"))
    found = gather(_find_tensors(directory, canonical_name), packing)
    to_read = {name: weight for name, weight in found.items() if not is_never_read(name)}
    to_compare = {copy: wanted[original] for copy, original in copies.items() if copy in to_read}
    unwanted = [to_read.pop(name) for name in _unwanted_biases(to_read, wanted)]
    _account(directory, wanted | to_compare, to_read, canonical_name)
    if room is not None:
        _check_room(directory, wanted.values(), room)
    for copy in to_compare:
        both = found[copy], found[copies[copy]]
        if not _are_equal(*(each.read(to_compare[copy]) for each in both)):
            raise UntiedTensorsError(directory, *(each.tensor.name for each in both))
    for bias in unwanted:
        if bias.tensor.read().any():
            raise TensorMismatchError(directory, surplus=[f"{bias.tensor.name} (is not zero)"])
    for name, weight in found.items():
        if slot := wanted.get(name):
            slot.fill(weight.read(slot))
            # Checked after conversion to the target dtype, whose range may be too small.
            if not is_finite(slot.digits):
                raise NotFiniteError(weight.tensor.path, weight.tensor.name, name_of(slot.digits.dtype))


def _find_tensors(directory: Path, canonical_name: Callable[[str], str]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        file = _open(path)
        for stored in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            name = canonical_name(stored)
            if name in found:
                raise TensorMismatchError(directory, surplus=[f"{stored} (also stored as {found[name].name})"])
            found[name] = StoredTensor(path, file, stored)
    return found


def weight_files(directory: Path) -> list[Path]:
    """Return the single file if it exists, as transformers does: an index beside it is left from an earlier save."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() or not index.exists():
        return [single]
    names = JsonFields.read(index).section("weight_map").values()
    # The index is untrusted: it must not lead out of the checkpoint's folder.
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointConfigError(index, "weight_map: must name the files of this folder that hold the tensors")
    return [directory / name for name in sorted(set(names))]


def stored_dtypes(directory: Path) -> set[str]:
    """Return the dtypes of all tensors in a checkpoint, by their safetensors names."""
    return {dtype for _, dtype in stored_tensors(directory)}


def stored_tensors(directory: Path) -> list[tuple[str, str]]:
    """Return the name and the dtype of each tensor in a checkpoint, from the files' headers."""
    files = [_open(path) for path in weight_files(directory)]
    return [(name, file.get_slice(name).get_dtype()) for file in files for name in file.keys()]  # noqa: SIM118


def _open(path: Path) -> Any:
    try:
        path.open("rb").close()  # safe_open reports files that it may not open as missing
    except FileNotFoundError:
        # A single file is looked for only where there is no index.
        is_sharded = path.name == SINGLE_FILE and any(path.parent.glob("*.safetensors"))
        hint = f", and no {INDEX_FILE}, which would list the folder's other .safetensors files" if is_sharded else ""
        raise CheckpointError(path, f"no such file{hint}") from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UnreadableTensorsError(path, f"truncated, or not a safetensors file: {error}") from error
    except (RuntimeError, MemoryError) as error:  # raised by torch and by safetensors
        message = f"its {path.stat().st_size / 2**30:.1f} GiB cannot be mapped into memory: {error}"
        raise CheckpointError(path, message) from error


def _check_room(directory: Path, slots: Iterable[WeightSlot], room: int) -> None:
    num_bytes = Counter[tuple[str, torch.dtype]]()
    for slot in slots:
        num_bytes[slot.target.device.type, slot.target.dtype] += slot.target.nbytes
    if num_bytes.total() > room:
        [(most, _)] = num_bytes.most_common(1)
        raise ModelTooLargeError(directory, num_bytes.total(), room, name_of(most[1]), _TO_TAKE_LESS.get(most))


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, from the extremes (NaN is one): `isfinite` takes ten times as long."""
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def _are_equal(copy: Tensor, original: Tensor) -> bool:
    """Return whether the two are equal; a copy may be stored in another dtype."""
    return torch.equal(copy, original.to(copy.dtype)) or torch.equal(copy.to(original.dtype), original)


def _unwanted_biases(found: Mapping[str, StoredWeight], wanted: Collection[str]) -> list[str]:
    """Return the names of biases of packed weights that the model lacks: some packers store zeros for them."""
    packed = (name.removesuffix("weight") + "bias" for name, each in found.items() if isinstance(each, PackedWeight))
    return [name for name in packed if name in found and name not in wanted]


def _account(
    directory: Path,
    wanted: Mapping[str, WeightSlot],
    found: Mapping[str, StoredWeight],
    canonical_name: Callable[[str], str],
) -> None:
    prefixes = {_split_prefixes(name, weight.tensor.name) for name, weight in found.items()}
    missing = [_as_stored(name, prefixes, canonical_name) for name in sorted(wanted.keys() - found.keys())]
    surplus = sorted(found[name].tensor.name for name in found.keys() - wanted.keys())
    misfits = [found[name].misfits(wanted[name]) for name in sorted(found.keys() & wanted.keys())]
    by_kind = [list(chain.from_iterable(kind)) for kind in zip(*misfits, strict=True)]
    of_parts, misshapen, mistyped = by_kind or ([], [], [])
    missing += of_parts
    if missing or surplus or misshapen or mistyped:
        raise TensorMismatchError(directory, missing, surplus, misshapen, mistyped)


def _split_prefixes(name: str, stored: str) -> tuple[str, str]:
    """Return both names without their common end."""
    from_ends = zip(reversed(name), reversed(stored), strict=False)
    num_common = len(list(takewhile(lambda pair: pair[0] == pair[1], from_ends)))
    return name[: len(name) - num_common], stored[: len(stored) - num_common]


def _as_stored(name: str, prefixes: Iterable[tuple[str, str]], canonical_name: Callable[[str], str]) -> str:
    """Return the name by which a checkpoint whose other names have these prefixes would store it; ours if unknown."""
    for own, stored in sorted(prefixes, key=lambda each: len(each[0]), reverse=True):
        candidate = stored + name.removeprefix(own)
        if name.startswith(own) and canonical_name(candidate) == name:
            return candidate
    return name
