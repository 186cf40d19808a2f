"""Checkpoints that were published quantized: which are taken, and what their numbers stand for.

A weight has its scales in a tensor beside it: one for all of it, one for each row, or one for each block.  What it
multiplies is never quantized here, whatever was published for that.
"""

import math

from torch import Tensor

from keepsight.json_fields import JsonFields

# What the names of scales have behind those of their weights.
SUFFIXES = ("_scale_inv", "_scale")
# What is beside a weight's name, of what it multiplies.
SCALE_OF_ROWS = "input_scale"
# As safetensors calls them.
QUANTIZED_DTYPES = ("F8_E4M3", "I8")
_METHODS = ("fp8", "compressed-tensors")
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_BLOCK = 128


def check_quantization(fields: JsonFields) -> None:
    """Of a checkpoint that has any."""
    if "quantization_config" not in fields:
        return
    section = fields.section("quantization_config")
    method = section.get("quant_method")
    if method not in _METHODS:
        instead = "take the checkpoint that it was made of, on a CPU with --quantization int8"
        told = f"{method!r} is not taken, only {' and '.join(_METHODS)}; {instead}"
        raise section.refuse("quant_method", told)
    if method == "compressed-tensors":
        _check_compressed(section)
    elif section.indexes("weight_block_size", (_BLOCK, _BLOCK), 2) != (_BLOCK, _BLOCK):
        raise section.refuse("weight_block_size", f"must be [{_BLOCK}, {_BLOCK}]")


def _check_compressed(section: JsonFields) -> None:
    section.choice("format", _FORMATS)
    groups = section.section("config_groups")
    for name in groups.names():
        weights = groups.section(name).section("weights")
        if weights.integer("num_bits") != 8:
            raise weights.refuse("num_bits", "must be 8")
        weights.choice("strategy", ("tensor", "channel"))
        if not weights.flag("symmetric", True):
            raise weights.refuse("symmetric", "must be true: zero points are not taken")


def fits_scales(weight: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    if math.prod(scales) == 1:
        return True
    if len(weight) != 2:
        return False
    rows, numbers = weight
    return scales in ((rows,), (rows, 1), (-(-rows // _BLOCK), -(-numbers // _BLOCK)))


def dequantize(weight: Tensor, scales: Tensor) -> Tensor:
    """[rows, numbers], as float32."""
    scales = scales.float()
    if scales.numel() == 1:
        return weight.float() * scales.flatten()
    if len(scales) == scales.numel() == len(weight):
        return weight.float() * scales.view(-1, 1)
    rows, numbers = weight.shape
    spread = scales.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :numbers]
    return weight.float() * spread
