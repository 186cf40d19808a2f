"""Reads embeddings of a picture or a prompt that a client computed: from .npy, .safetensors or an array to float32.

Headers are parsed here, within bounds, and nothing in a file is ever evaluated. Embeddings must have this model's
shape and only numbers that it can compute with, as the keys computed from them are in memory that all requests share.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from keepsight.errors import PictureEmbedsError
from keepsight.frontend.intake.picture_array import is_array
from keepsight.frontend.intake.read_data_url import decode_base64, read_data_url

Values = npt.NDArray[np.float32]
Shape = tuple[int, ...]
# The number of tokens (None for a prompt: any number) and the hidden size.
Wanted = tuple[int | None, int]

ALLOWED = "a .npy file of float32 or float16, or a .safetensors file of one tensor of float32, float16 or bfloat16"
MAX_NPY_HEADER_BYTES, MAX_SAFETENSORS_HEADER_BYTES = 1024, 16 * 1024
# The square of a larger number is infinite.
MAX_MAGNITUDE = 1e18
_NPY_MAGIC = b"\x93NUMPY"
# The size in bytes of the header's length field, by major version.
_NPY_LENGTHS = {1: 2, 2: 4, 3: 4}
# The header of a .npy file is a Python dict literal; matched after whitespace is removed.
_NPY_FIELD = r"""['"](\w+)['"]:['"]?(\([0-9,]*\)|[\w<>|=]+)['"]?"""
_NPY_HEADER = re.compile(rf"\{{{_NPY_FIELD},{_NPY_FIELD},{_NPY_FIELD},?\}}", re.ASCII)
_NPY_DTYPES = {"<f4": "float32", "<f2": "float16"}
_SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Embeds:
    """Contiguous embeddings, which must never change."""

    values: Values  # [tokens, hidden]


def fetch_embeds(source: object, field: str, max_bytes: int) -> object:
    """Return the bytes of a file that was sent as text, unless they are too many; other objects are returned as is."""
    if isinstance(source, str):
        if source[:5].lower() == "data:":
            return read_data_url(source, field, max_bytes)
        return decode_base64(source, field, max_bytes, "the text")
    return bytes(source) if isinstance(source, bytearray | memoryview) else source


def read_embeds(source: object, field: str, wanted: Wanted) -> Embeds:
    """Return embeddings as float32. Raise PictureEmbedsError if the shape, without a leading 1, is not as wanted."""
    values = _read_file(source, field, wanted) if isinstance(source, bytes) else _read_array(source, field, wanted)
    if not np.abs(values).max() <= MAX_MAGNITUDE:  # false for a NaN, too
        _refuse(field, f"hold a NaN, an infinity, or a number beyond {MAX_MAGNITUDE:g}")
    values.flags.writeable = False
    return Embeds(values)


def _refuse(field: str, message: str) -> NoReturn:
    raise PictureEmbedsError(field, message)


def _check_kind(dtype: str, found: Shape, wanted: Wanted, field: str) -> Shape:
    """Check the dtype and the shape; return the shape without a leading 1."""
    if dtype not in _ITEM_BYTES:
        _refuse(field, f"embeddings of {dtype[:40]} are not supported; allowed is {ALLOWED}")
    shape = found[1:] if len(found) == 3 and found[0] == 1 else found
    num_tokens, width = wanted
    if len(shape) != 2 or shape[1] != width or shape[0] < 1 or num_tokens not in (None, shape[0]):
        shown = str(list(found)) if len(found) <= 4 and max(found, default=0) < 2**63 else f"{len(found)} axes"
        allowed = f"a prompt of this model has [tokens, {width}]"
        if num_tokens is not None:
            allowed = f"a picture of this model has {list(wanted)}"
        _refuse(field, f"have the shape {shown}, {allowed}")
    return shape


# Files --------------------------------------------------------------------------------------------------------


class _Header(NamedTuple):
    dtype: str
    shape: Shape
    is_fortran: bool
    # Where the values begin in the file.
    offset: int


def _read_file(data: bytes, field: str, wanted: Wanted) -> Values:
    try:
        header = _parse_npy(data) if data.startswith(_NPY_MAGIC) else _parse_safetensors(data)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        _refuse(field, f"{len(data)} bytes that are not {ALLOWED}: {str(error)[:200]}")
    shape = _check_kind(header.dtype, header.shape, wanted, field)
    payload = memoryview(data)[header.offset :]
    expected = math.prod(header.shape) * _ITEM_BYTES[header.dtype]
    if len(payload) != expected:
        _refuse(field, f"a header that announces {expected} bytes is followed by {len(payload)}")
    stored = _view(payload, header.dtype).reshape(header.shape, order="F" if header.is_fortran else "C")
    return np.array(stored.reshape(shape), np.float32, order="C")


def _parse_npy(data: bytes) -> _Header:
    length_bytes = _NPY_LENGTHS.get(data[6]) if len(data) > 8 else None
    if length_bytes is None:
        raise ValueError("an unknown version of .npy")
    begin = 8 + length_bytes
    end = begin + int.from_bytes(data[8:begin], "little")
    header = _NPY_HEADER.fullmatch("".join(_cut(data, begin, end, MAX_NPY_HEADER_BYTES).decode("latin1").split()))
    match None if header is None else dict(zip(header.groups()[::2], header.groups()[1::2], strict=True)):
        case {"descr": dtype, "fortran_order": "True" | "False" as is_fortran, "shape": sides} if sides[0] == "(":
            shape = tuple(int(side) for side in sides[1:-1].split(",") if side)
            return _Header(_NPY_DTYPES.get(dtype, repr(dtype)), shape, is_fortran == "True", end)
    raise ValueError("a header of another form")


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_SAFETENSORS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TENSOR = msgspec.json.Decoder(_Tensor)


def _parse_safetensors(data: bytes) -> _Header:
    end = 8 + int.from_bytes(data[:8], "little")
    entries = _SAFETENSORS.decode(_cut(data, 8, end, MAX_SAFETENSORS_HEADER_BYTES))
    entries.pop("__metadata__", None)
    if len(entries) != 1:
        raise ValueError(f"{len(entries)} tensors")
    [entry] = entries.values()
    tensor = _TENSOR.decode(entry)
    if tensor.data_offsets != (0, len(data) - end):
        raise ValueError(f"a tensor at {list(tensor.data_offsets)} of {len(data) - end} bytes")
    return _Header(_SAFETENSORS_DTYPES.get(tensor.dtype, repr(tensor.dtype)), tensor.shape, False, end)


def _cut(data: bytes, begin: int, end: int, max_bytes: int) -> bytes:
    if not begin < end <= min(len(data), begin + max_bytes):
        raise ValueError(f"a header that is cut off, or of more than {max_bytes} bytes")
    return data[begin:end]


def _view(payload: memoryview, dtype: str) -> npt.NDArray[np.floating[Any]]:
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(payload, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(payload, "<f4" if dtype == "float32" else "<f2")


# Objects ------------------------------------------------------------------------------------------------------


def _read_array(source: object, field: str, wanted: Wanted) -> Values:
    if not is_array(source):
        _refuse(field, f"must be {ALLOWED}, an array or a tensor, not {type(source).__name__}")
    shape = _check_kind(str(source.dtype).removeprefix("torch."), tuple(source.shape), wanted, field)
    if isinstance(source, np.ndarray):
        return np.array(source.reshape(shape), np.float32, order="C")
    try:
        # numpy has no bfloat16.
        return np.array(source.detach().cpu().float().numpy().reshape(shape), order="C")
    except (RuntimeError, TypeError) as error:  # sparse, or on the meta device
        _refuse(field, f"a tensor without dense data: {error}")
