"""Malformed and odd forms; `test_read_upload` has those of common programs."""

from collections.abc import Mapping
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.http.read_form import MAX_PARTS, FormPart, read_form
from tests.scheduling.long_run import thorough

BOUNDARY = "limit"
DELIMITER = f"\r\n--{BOUNDARY}".encode()
# Strings with a meaning in a form, whole and in part.
WORDS = [
    DELIMITER, DELIMITER[2:], DELIMITER[2:-1], b"--", b"\r\n", b"\r\n\r\n", b"\r", b"\n", b" ", b":", b";", b"a", b"/",
    b"Content-Disposition: form-data", b"content-type:", b"image/PNG", b"; name=", b'; name="a"', b'; filename="b.png"',
    b"; filename*=", b"UTF-8''", b"iso-8859-1'en'", b'"', b"\\", b"%22", b"%e2", b"\xe2",
]  # fmt: skip
pieces = st.lists(st.sampled_from(WORDS) | st.binary(max_size=3), max_size=8).map(b"".join)
names = st.sampled_from([b"a", b'"a"', b'"b"', b'"c;"', b'"\\""', b'"\\\\"']) | pieces
# Mostly well-formed parts.
parts = st.tuples(names, pieces, pieces).map(
    lambda part: b"\r\nContent-Disposition: form-data; name=%b%b\r\n\r\n%b" % part
)
forms = st.lists(parts, max_size=3).map(lambda parts: DELIMITER[2:] + DELIMITER.join([*parts, b"--"]))


def write_form(parts: Mapping[str, FormPart]) -> bytes:
    """Write a form by RFC 7578, except that file names are written by RFC 5987, which can encode any name."""
    written = b""
    for name, part in parts.items():
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        filename = "" if part.filename is None else f"; filename*=UTF-8''{quote(part.filename, safe='')}"
        head = f'Content-Disposition: form-data; name="{escaped}"{filename}\r\nContent-Type: {part.media_type}'
        written += DELIMITER + f"\r\n{head}\r\n\r\n".encode() + part.content
    return written + DELIMITER + b"--"


@thorough(max_examples=50)
@given(body=forms | pieces)
def test_any_form_is_refused_or_survives_being_written_and_read_again(body: bytes) -> None:
    try:
        read = read_form(body, BOUNDARY)
    except InvalidArgumentError:
        return
    assert read_form(write_form(read), BOUNDARY) == read
    assert sum(len(part.content) for part in read.values()) <= len(body)
    for part in read.values():
        assert part.content in body
        assert DELIMITER not in part.content
        assert not {"/", "\\"} & {*(part.filename or "")}


def test_the_maximum_number_of_parts_is_read_and_no_more() -> None:
    parts = {f"n{number}": FormPart(b"%d" % number) for number in range(MAX_PARTS + 1)}
    with pytest.raises(InvalidArgumentError, match=f"at most {MAX_PARTS} parts"):
        read_form(write_form(parts), BOUNDARY)
    parts.popitem()
    assert read_form(write_form(parts), BOUNDARY) == parts
