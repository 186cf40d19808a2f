"""Which embeddings are accepted, from which files and objects; anything else raises our own error."""

import base64
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from keepsight.errors import MediaTooLargeError, PictureEmbedsError, UnreadablePictureError
from keepsight.frontend.intake.read_embeds import (
    MAX_MAGNITUDE,
    MAX_NPY_HEADER_BYTES,
    MAX_SAFETENSORS_HEADER_BYTES,
    fetch_embeds,
    read_embeds,
)
from tests.precomputed import to_npy, to_safetensors

SHAPE = (4, 6)
# These values are exact in bfloat16.
VALUES = np.arange(-12, 12, dtype=np.float32).reshape(SHAPE)
TENSOR = torch.from_numpy(VALUES.copy())
FIELD = "messages[0].content[1].image_embeds"
NPY = to_npy(VALUES)
SAFETENSORS = to_safetensors(("F32", [4, 6], VALUES.tobytes()))


def torch_saved() -> bytes:
    buffer = io.BytesIO()
    torch.save(TENSOR, buffer)
    return buffer.getvalue()


def with_header(header: bytes, length: int | None = None) -> bytes:
    num_bytes = len(header) if length is None else length
    return NPY[:8] + num_bytes.to_bytes(2, "little") + header + VALUES.tobytes()


TAKEN: dict[str, object] = {
    "npy": NPY,
    "npy of version 2": to_npy(VALUES, version=(2, 0)),
    "npy of version 3": to_npy(VALUES, version=(3, 0)),
    "npy of float16": to_npy(VALUES.astype(np.float16)),
    "npy in Fortran's order": to_npy(np.asfortranarray(VALUES)),
    "npy of one picture": to_npy(VALUES[np.newaxis]),
    "npy of one picture in Fortran's order": to_npy(np.asfortranarray(VALUES[np.newaxis])),
    "npy written by another": with_header(b'{"shape":(4,6,),"fortran_order":False,"descr":"<f4"}'),
    "safetensors": SAFETENSORS,
    "safetensors with metadata": to_safetensors(("F32", [1, 4, 6], VALUES.tobytes()), metadata={"format": "np"}),
    "safetensors as its own library writes it": save({"embeds": TENSOR}),
    "safetensors of float16": save({"embeds": TENSOR.half()}),
    "safetensors of bfloat16": save({"embeds": TENSOR.bfloat16()}),
    "array": VALUES,
    "array of float16": VALUES.astype(np.float16),
    "array in Fortran's order": np.asfortranarray(VALUES),
    "array of one picture": VALUES[np.newaxis],
    "tensor": TENSOR,
    "tensor of bfloat16": TENSOR.bfloat16(),
    "tensor with a gradient": torch.nn.Parameter(TENSOR.clone()),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_becomes_the_same_numbers_of_its_own(name: str) -> None:
    values = read_embeds(TAKEN[name], FIELD, SHAPE).values
    assert np.array_equal(values, VALUES)
    assert (values.dtype, values.shape) == (np.dtype(np.float32), SHAPE)
    assert values.flags.c_contiguous
    assert values.flags.aligned
    assert not values.flags.writeable
    assert not np.shares_memory(values, VALUES)


def with_first(number: float, dtype: type = np.float32) -> Any:
    values: Any = VALUES.astype(dtype)
    values[0, 0] = number
    return values


REFUSED: dict[str, tuple[object, str]] = {
    "nothing": (b"", "0 bytes that are not a .npy file"),
    "a text": (b"hello, I am no embeddings", "25 bytes that are not"),
    "a pickle": (pickle.dumps(VALUES), "that are not a .npy file"),
    "a file of torch.save": (torch_saved(), "that are not a .npy file"),
    "npy cut": (NPY[:-1], "announces 96 bytes is followed by 95"),
    "npy cut in its header": (NPY[:40], "cut off"),
    "npy with more behind it": (NPY + b"x", "announces 96 bytes is followed by 97"),
    "npy of an unknown version": (NPY[:6] + b"\4\0" + NPY[8:], "unknown version"),
    "npy of objects": (to_npy(VALUES.astype(object)), "embeddings of '|O' are not supported"),
    "npy of float64": (to_npy(VALUES.astype(np.float64)), "embeddings of '<f8' are not supported"),
    "npy of integers": (to_npy(VALUES.astype(np.int32)), "embeddings of '<i4' are not supported"),
    "npy of big-endian numbers": (to_npy(VALUES.astype(">f4")), "embeddings of '>f4' are not supported"),
    "npy of another format's type": (NPY.replace(b"'<f4'", b"'F32'"), "embeddings of 'F32' are not supported"),
    "npy of records": (to_npy(np.zeros(SHAPE, [("a", "<f4")])), "a header of another form"),
    "npy with code for a header": (with_header(b"__import__('os').getcwd()"), "are not a .npy file"),
    "npy with a long header": (
        with_header(NPY[10:128].ljust(MAX_NPY_HEADER_BYTES + 1)),
        f"more than {MAX_NPY_HEADER_BYTES} bytes",
    ),
    "npy with sides that are no integers": (NPY.replace(b"(4, 6)", b"(4,6.)"), "another form"),
    "npz": (b"PK\3\4" + NPY, "are not"),
    "another hidden size": (to_npy(VALUES[:, :5]), r"shape \[4, 5\], a picture of this model has \[4, 6\]"),
    "fewer tokens": (to_npy(VALUES[:3]), r"shape \[3, 6\]"),
    "a side of many digits": (with_header(NPY[10:128].replace(b"(4, 6)", b"(" + b"9" * 800 + b",)")), "shape 1 axes"),
    "several pictures": (to_npy(np.stack([VALUES, VALUES])), r"shape \[2, 4, 6\]"),
    "one axis": (to_npy(VALUES.reshape(-1)), r"shape \[24\]"),
    "no axis": (to_npy(np.float32(1)), r"shape \[\]"),  # type: ignore[arg-type]
    "many axes": (to_npy(VALUES.reshape(1, 1, 1, 4, 6)), "shape 5 axes"),
    "a NaN": (to_npy(with_first(np.nan)), "hold a NaN"),
    "an infinity": (to_npy(with_first(-np.inf, np.float16)), "an infinity"),
    "a number whose square is none": (to_npy(with_first(-1.1 * MAX_MAGNITUDE)), "beyond 1e\\+18"),
    "safetensors cut": (SAFETENSORS[:-1], r"at \[0, 96\] of 95 bytes"),
    "safetensors cut in its header": (SAFETENSORS[:20], "cut off"),
    "safetensors of no tensor": (to_safetensors(metadata={}), "0 tensors"),
    "safetensors of two": (to_safetensors(*[("F32", [4, 6], VALUES.tobytes())] * 2), "2 tensors"),
    "safetensors of integers": (to_safetensors(("I32", [4, 6], VALUES.tobytes())), "embeddings of 'I32'"),
    "safetensors of another shape": (to_safetensors(("F32", [6, 4], VALUES.tobytes())), r"shape \[6, 4\]"),
    "safetensors of a lie": (to_safetensors(("F16", [4, 6], VALUES.tobytes())), "announces 48 bytes"),
    "safetensors with a long header": (
        to_safetensors(("F32", [4, 6], VALUES.tobytes()), metadata={"a": "x" * MAX_SAFETENSORS_HEADER_BYTES}),
        f"more than {MAX_SAFETENSORS_HEADER_BYTES} bytes",
    ),
    "safetensors of a bfloat16 NaN": (to_safetensors(("BF16", [4, 6], b"\xff" * 48)), "hold a NaN"),
    "an array of integers": (VALUES.astype(np.uint8), "embeddings of uint8"),
    "an array of another shape": (VALUES.T, r"shape \[6, 4\]"),
    "an array with a NaN": (with_first(np.nan), "hold a NaN"),
    "a tensor without data": (TENSOR.to("meta"), "without dense data"),
    "a sparse tensor": (TENSOR.to_sparse(), "without dense data"),
    "no array": (object(), "not object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_else_is_one_error_that_names_its_field(name: str) -> None:
    source, message = REFUSED[name]
    with pytest.raises(PictureEmbedsError, match=message) as caught:
        read_embeds(source, FIELD, SHAPE)
    assert caught.value.field == FIELD
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_prompt_has_as_many_tokens_as_it_has(num_tokens: int) -> None:
    for rows in (VALUES[:num_tokens], VALUES[np.newaxis, :num_tokens]):
        for source in (to_npy(rows), rows, torch.from_numpy(rows.copy())):
            assert np.array_equal(read_embeds(source, FIELD, (None, 6)).values, VALUES[:num_tokens])


@pytest.mark.parametrize("rows", [VALUES[:0], VALUES[:, :5], VALUES[0], np.stack([VALUES, VALUES])])
def test_a_prompt_without_tokens_or_of_another_width_is_refused(rows: Any) -> None:
    with pytest.raises(PictureEmbedsError, match=r"have the shape .* a prompt of this model has \[tokens, 6\]"):
        read_embeds(to_npy(rows), FIELD, (None, 6))


def test_the_text_of_a_request_is_base64_or_a_data_url() -> None:
    text = base64.b64encode(NPY).decode()
    for source in (text, f"data:application/octet-stream;base64,{text}", NPY, bytearray(NPY)):
        assert fetch_embeds(source, FIELD, 10_000) == NPY
    for wrong in ("https://example.org/a.npy", "file:///etc/hostname", text[:-1], "é"):
        with pytest.raises(UnreadablePictureError, match="not base64") as caught:
            fetch_embeds(wrong, FIELD, 10_000)
        assert caught.value.field == FIELD
    with pytest.raises(MediaTooLargeError, match="more than the 200 bytes"):
        fetch_embeds(text, FIELD, 200)


def assert_taken_or_refused(data: bytes) -> None:
    try:
        values = read_embeds(data, FIELD, SHAPE).values
    except PictureEmbedsError:
        return
    assert values.shape == SHAPE
    assert np.isfinite(values).all()


# Fragments of headers, to be put together in any order.
WORDS = (
    b"{",
    b"}",
    b"(",
    b"[",
    b"'",
    b'"',
    b"-",
    b":",
    b",",
    b" ",
    b"\0",
    b"\xff",
    b"None",
    b"1e999",
    b"1+1j",
    b"9" * 400,
)
OF_NPY = (b"'descr': '<f4'", b"'shape': (4, 6)", b"'fortran_order': False", b"\\N{DIGIT ONE}", b"{[]: 1}")
OF_SAFETENSORS = (b'"t":', b'"dtype":"F32"', b'"shape":[4,6]', b'"data_offsets":[0,96]')
words = st.sampled_from((*WORDS, *OF_NPY, *OF_SAFETENSORS))
pieces = st.lists(words | st.binary(max_size=8), max_size=12).map(b"".join)


@given(pieces, st.integers(0, 200) | st.none(), st.sampled_from((1, 2, 3)), st.booleans())
def test_any_header_is_taken_or_refused(piece: bytes, length: int | None, version: int, is_npy: bool) -> None:
    length_bytes = (2 if version == 1 else 4) if is_npy else 8
    length_field = (len(piece) if length is None else length).to_bytes(length_bytes, "little")
    start = b"\x93NUMPY" + bytes([version, 0]) if is_npy else b""
    assert_taken_or_refused(start + length_field + piece + VALUES.tobytes())


@given(st.sampled_from((NPY, SAFETENSORS)), st.integers(0, 140), st.integers(0, 20), pieces)
def test_any_change_of_a_file_is_taken_or_refused(file: bytes, begin: int, length: int, piece: bytes) -> None:
    assert_taken_or_refused(file[:begin] + piece + file[begin + length :])


def test_depth_is_bounded() -> None:
    nested = b'{"t":' + b"[" * 16_000
    assert_taken_or_refused(len(nested).to_bytes(8, "little") + nested + VALUES.tobytes())
