"""Checkpoints that were published quantized: which formats are supported, and how weights are dequantized.

A weight of 8 bits has its scales in a separate tensor: one for all of it, one per row, or one per block. For packed
weights see `packed_weights.py`. Activations are never quantized here; published scales for them are ignored.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from keepsight.json_fields import JsonFields
from keepsight.models.packed_weights import WORDS, Packing, awq, compressed, gptq

# Suffixes added to a weight's name for its scales.
SUFFIXES = ("_scale_inv", "_scale")
# The name, next to a weight, of the scale of its activations.
SCALE_OF_ROWS = "input_scale"
# As named by safetensors.
QUANTIZED_DTYPES = ("F8_E4M3", "I8")
_BLOCK = 128
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def check_quantization(fields: JsonFields) -> None:
    read_packing(fields)


def read_packing(fields: JsonFields) -> Packing | None:
    """Return a checkpoint's packing; None if its weights are not packed. Refuse quantization that is not supported."""
    if "quantization_config" not in fields:
        return None
    section = fields.section("quantization_config")
    read = _READERS.get(str(section.get("quant_method")))
    if read is None:
        instead = "use the original checkpoint, on a CPU with --quantization int8"
        message = f"{section.get('quant_method')!r} is not supported, only {', '.join(_READERS)}; {instead}"
        raise section.refuse("quant_method", message)
    return read(section)


def _read_fp8(section: JsonFields) -> None:
    if section.indexes("weight_block_size", (_BLOCK, _BLOCK), 2) != (_BLOCK, _BLOCK):
        raise section.refuse("weight_block_size", f"must be [{_BLOCK}, {_BLOCK}]")


def _read_awq(section: JsonFields) -> Packing:
    _check_bits(section, "bits", (4,))
    _read_format(section, ("version", "format", "checkpoint_format"), ("gemm",))
    if section.get("backend") == "llm-awq":
        raise section.refuse("backend", "'llm-awq' is not supported: it packs differently")
    if not section.flag("zero_point", True):
        raise section.refuse("zero_point", "must be true")
    return awq(_read_group_size(section))


def _read_gptq(section: JsonFields) -> Packing:
    num_bits = _check_bits(section, "bits", (4, 8))
    checkpoint_format = _read_format(section, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    needs_groups = section.flag("desc_act", False)
    zeros_less = int(checkpoint_format == "gptq")
    return gptq(num_bits, _read_group_size(section), needs_groups=needs_groups, zeros_less=zeros_less)


def _read_format(section: JsonFields, names: Sequence[str], choices: Sequence[str]) -> str:
    """Return the first of these fields that is there (names changed over time), or else the first choice."""
    name = next((name for name in names if name in section), names[0])
    value = str(section.get(name) or choices[0]).lower()
    if value not in choices:
        raise section.refuse(name, f"must be {' or '.join(choices)}, not {value!r}")
    return value


def _check_bits(section: JsonFields, name: str, choices: Sequence[int]) -> int:
    num_bits = section.integer(name)
    if num_bits not in choices:
        raise section.refuse(name, f"must be {' or '.join(map(str, choices))}, not {num_bits}")
    return num_bits


def _read_group_size(section: JsonFields) -> int | None:
    return None if section.get("group_size") == -1 else section.integer("group_size")


def _read_compressed(section: JsonFields) -> Packing | None:
    is_packed = section.choice("format", _FORMATS) == "pack-quantized"
    groups = section.section("config_groups")
    read = _read_packed if is_packed else _check_scaled
    packings = {read(groups.section(name).section("weights")) for name in groups.names()}
    if len(packings) > 1 or (is_packed and not packings):
        raise section.refuse("config_groups", "must be present and all alike")
    return packings.pop() if packings else None


def _check_scaled(weights: JsonFields) -> None:
    _check_bits(weights, "num_bits", (8,))
    weights.choice("strategy", ("tensor", "channel"))
    if not weights.flag("symmetric", True):
        raise weights.refuse("symmetric", "must be true: zero points are supported only for packed weights")


def _read_packed(weights: JsonFields) -> Packing:
    num_bits = _check_bits(weights, "num_bits", (4, 8))
    weights.choice("type", ("int",), "int")
    has_groups = weights.choice("strategy", ("group", "channel")) == "group"
    return compressed(
        num_bits,
        weights.integer("group_size") if has_groups else None,
        needs_groups=weights.get("actorder") in ("group", "dynamic", True),
        has_zeros=not weights.flag("symmetric", True),
    )


_READERS: Mapping[str, Callable[[JsonFields], Packing | None]] = {
    "fp8": _read_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
}


def are_quantized(dtypes: Collection[str]) -> bool:
    """Return whether a checkpoint with tensors of these dtypes is quantized."""
    return not {*QUANTIZED_DTYPES, *WORDS}.isdisjoint(dtypes)


def fits_scales(weight: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    if math.prod(scales) == 1:
        return True
    if len(weight) != 2:
        return False
    rows, numbers = weight
    return scales in ((rows,), (rows, 1), (-(-rows // _BLOCK), -(-numbers // _BLOCK)))


def dequantize(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the weight [rows, numbers] as float32."""
    scales = scales.float()
    if scales.numel() == 1:
        return weight.float() * scales.flatten()
    if len(scales) == scales.numel() == len(weight):
        return weight.float() * scales.view(-1, 1)
    rows, numbers = weight.shape
    spread = scales.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :numbers]
    return weight.float() * spread
