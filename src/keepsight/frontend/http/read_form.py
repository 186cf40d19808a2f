"""A body of `multipart/form-data` (RFC 7578), whole: its parts by their names."""

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from keepsight.errors import InvalidArgumentError

MAX_PARTS = 8
# Of what stands before a part's content: no more of it is looked at.  A name of 500 letters, written twice, has room.
MAX_HEAD_BYTES = 8192
# Of a header: a name, and its value between quotes or without.
_PARAMETER = re.compile(r';\s*+([^\s;="]++)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]*+))')

# As browsers write a line's end and a quotation mark in a name.
_ESCAPED = re.compile("%(?:0A|0D|22)")


class FormPart(NamedTuple):
    content: bytes
    # As whoever sends it calls it.
    filename: str | None = None
    media_type: str = ""

    def as_text(self) -> str:
        return self.content.decode(errors="replace")


def read_form(body: bytes, boundary: str) -> dict[str, FormPart]:
    if not boundary:
        raise InvalidArgumentError("Content-Type", "multipart/form-data must name its boundary")
    read: dict[str, FormPart] = {}
    for begin, end in _find_parts(body, b"\r\n--" + boundary.encode()):
        head_end = body.find(b"\r\n\r\n", begin, end)
        head = b"" if head_end < 0 else body[begin : min(head_end, begin + MAX_HEAD_BYTES)]
        headers = _read_headers(head)
        _, told = parse_header(headers.get("content-disposition", ""))
        name = told.get("name")
        if name is None:
            raise InvalidArgumentError("body", "a part of the form has no name")
        if name in read:
            raise InvalidArgumentError(name, "is given twice in the form")
        kind, _ = parse_header(headers.get("content-type", ""))
        read[name] = FormPart(body[head_end + 4 : end], _filename_of(told), kind)
    return read


def _find_parts(body: bytes, delimiter: bytes) -> list[tuple[int, int]]:
    """Where each begins and ends: nothing of what may be large is copied but what is in them."""
    parts: list[tuple[int, int]] = []
    # The first delimiter may be the first line.
    end = -2 if body.startswith(delimiter[2:]) else body.find(delimiter)
    while end != -1 and len(parts) <= MAX_PARTS:
        begin = end + len(delimiter)
        if body.startswith(b"--", begin):
            return parts
        end = body.find(delimiter, begin)
        parts.append((begin, end))
    raise InvalidArgumentError("body", f"is no form of at most {MAX_PARTS} parts that ends with its boundary")


def parse_header(value: str) -> tuple[str, dict[str, str]]:
    """`kind; name="value"`, with the kind in small letters."""
    kind = value.partition(";")[0].strip().lower()
    found = (each.groups("") for each in _PARAMETER.finditer(value))
    return kind, {name.lower(): bare or re.sub(r'\\(["\\])', r"\1", quoted) for name, quoted, bare in found}


def _read_headers(head: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in head.decode(errors="replace").split("\r\n"))
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _filename_of(told: Mapping[str, str]) -> str | None:
    """Without the folders that some write before it.  Of other letters than ASCII it may be as RFC 5987 has it."""
    name = told.get("filename")
    if "filename*" in told:
        charset, _, value = told["filename*"].partition("'")
        is_latin = charset.lower() == "iso-8859-1"
        name = unquote(value.partition("'")[2], "latin-1" if is_latin else "utf-8")
    elif name is not None:
        name = _ESCAPED.sub(lambda found: unquote(found[0]), name)
    return name and re.split(r"[/\\]", name)[-1]
