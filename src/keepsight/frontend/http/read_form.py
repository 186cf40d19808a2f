"""Splits a whole body of `multipart/form-data` (RFC 7578) into its parts, by name."""

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from keepsight.errors import InvalidArgumentError

MAX_PARTS = 8
# Limit on the headers of a part; the rest is ignored. A name of 500 letters, written twice, has room.
MAX_HEAD_BYTES = 8192
# A parameter of a header: a name, and its value with quotes or without.
_PARAMETER = re.compile(r';\s*+([^\s;="]++)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]*+))')

# Line ends and quotation marks in a name, as browsers write them.
_ESCAPED = re.compile("%(?:0A|0D|22)")


class FormPart(NamedTuple):
    content: bytes
    # The name given by the sender.
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
        _, parameters = parse_header(headers.get("content-disposition", ""))
        name = parameters.get("name")
        if name is None:
            raise InvalidArgumentError("body", "a part of the form has no name")
        if name in read:
            raise InvalidArgumentError(name, "is given twice in the form")
        kind, _ = parse_header(headers.get("content-type", ""))
        read[name] = FormPart(body[head_end + 4 : end], _filename_of(parameters), kind)
    return read


def _find_parts(body: bytes, delimiter: bytes) -> list[tuple[int, int]]:
    """Return where each part begins and ends: of a body that may be large, only the contents of parts are copied."""
    parts: list[tuple[int, int]] = []
    # The first delimiter may be the first line.
    end = -2 if body.startswith(delimiter[2:]) else body.find(delimiter)
    while end != -1 and len(parts) <= MAX_PARTS:
        begin = end + len(delimiter)
        if body.startswith(b"--", begin):
            return parts
        end = body.find(delimiter, begin)
        parts.append((begin, end))
    raise InvalidArgumentError("body", f"must be a form of at most {MAX_PARTS} parts that ends with its boundary")


def parse_header(value: str) -> tuple[str, dict[str, str]]:
    """Parse `kind; name="value"` into the kind and the values by name; kind and names are lowercased."""
    kind = value.partition(";")[0].strip().lower()
    found = (each.groups("") for each in _PARAMETER.finditer(value))
    return kind, {name.lower(): bare or re.sub(r'\\(["\\])', r"\1", quoted) for name, quoted, bare in found}


def _read_headers(head: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in head.decode(errors="replace").split("\r\n"))
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _filename_of(parameters: Mapping[str, str]) -> str | None:
    """Return the filename, without folders that some clients add. Non-ASCII names may be encoded as in RFC 5987."""
    name = parameters.get("filename")
    if "filename*" in parameters:
        charset, _, value = parameters["filename*"].partition("'")
        is_latin = charset.lower() == "iso-8859-1"
        name = unquote(value.partition("'")[2], "latin-1" if is_latin else "utf-8")
    elif name is not None:
        name = _ESCAPED.sub(lambda found: unquote(found[0]), name)
    return name and re.split(r"[/\\]", name)[-1]
