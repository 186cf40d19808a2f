"""Reads an upload and its options from a raw body, a form (`multipart/form-data`), or JSON.

Options may also be in the query; those in the body take precedence. Unknown names are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from keepsight.errors import InvalidArgumentError, UnsupportedBodyError, UnsupportedFieldError
from keepsight.frontend.http.decode_body import Buffer, check_num_values, without_mark
from keepsight.frontend.http.read_form import FormPart, parse_header, read_form
from keepsight.frontend.intake.media_handles import DEFAULT_TTL_SECONDS

# Other media types of bodies that are the upload itself.
_OTHER_KINDS = ("application/pdf", "application/octet-stream")
_BASE64 = "data:application/octet-stream;base64,"
# What an upload itself may be named in each kind of body with named fields.
_SOURCES = {"application/json": ("url", "data"), "multipart/form-data": ("file",)}
MAX_TTL_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class UploadOptions:
    ttl_seconds: float
    # True to make its embeddings at once.
    warm: bool = False
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    # Bytes, or a URL.
    source: bytes | str
    # The name of the caller's field that it came in.
    field: str
    options: UploadOptions


def read_upload(content_type: str, body: Buffer, query: Mapping[str, str]) -> Upload:
    body = bytes(body)
    kind, parameters = parse_header(content_type)
    source: bytes | str
    if kind == "application/json":
        field, source, fields = _read_json(body)
    elif kind == "multipart/form-data":
        field, source, fields = _read_form(body, parameters.get("boundary", ""))
    elif kind.startswith(("image/", "video/", "audio/")) or kind in _OTHER_KINDS:
        field, source, fields = "body", body, {}
    else:
        kinds = ", ".join(("image/*", "video/*", "audio/*", *_OTHER_KINDS, "multipart/form-data"))
        raise UnsupportedBodyError("Content-Type", f"must be {kinds} or application/json, not {kind[:80]!r}")
    return Upload(source, field, _as_options(_read_texts(query) | fields, _SOURCES.get(kind, ())))


def read_options(body: bytes, query: Mapping[str, str]) -> UploadOptions:
    """Read the options of a request about an earlier upload."""
    return _as_options(_read_texts(query) | (_decode(body) if body else {}))


def _read_json(body: bytes) -> tuple[str, str, dict[str, Any]]:
    fields = _decode(body)
    given = {name: fields.pop(name, None) for name in _SOURCES["application/json"]}
    sources = {name: source for name, source in given.items() if source is not None}
    if len(sources) != 1:
        raise InvalidArgumentError("url", "exactly one of url and data (base64) must be given")
    [(field, source)] = sources.items()
    if not isinstance(source, str) or not source:
        raise InvalidArgumentError(field, "must be a non-empty string")
    return field, source if field == "url" or source.startswith("data:") else _BASE64 + source, fields


def _decode(body: bytes) -> dict[str, Any]:
    check_num_values(body)
    try:
        return msgspec.json.decode(without_mark(body), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError("body", f"cannot be read as a JSON object: {error}") from error


def _read_form(body: bytes, boundary: str) -> tuple[str, bytes, dict[str, Any]]:
    parts = read_form(body, boundary)
    file = take_file(parts)
    return "file", file.content, _read_texts({name: part.as_text() for name, part in parts.items()})


def take_file(parts: dict[str, FormPart]) -> FormPart:
    """Remove the part named `file` from a form's parts and return it."""
    if "file" not in parts:
        raise InvalidArgumentError("file", "is required: the form has no part with this name")
    return parts.pop("file")


def _read_texts(texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse options that were not written as JSON."""
    return {name: _TEXT_READERS[name](text) if name in _TEXT_READERS else text for name, text in texts.items()}


def _read_number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _read_switch(text: str) -> object:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)


_TEXT_READERS: dict[str, Callable[[str], object]] = {"ttl_seconds": _read_number, "warm": _read_switch}


def _as_options(fields: Mapping[str, Any], sources: Sequence[str] = ()) -> UploadOptions:
    """`sources`: the other fields that such a body may have, for the error."""
    for name in fields:
        if name not in UploadOptions.__slots__:
            known = ", ".join((*sources, *UploadOptions.__slots__))
            raise UnsupportedFieldError(name[:80], f"is unknown; known: {known}")
    warm, salt = fields.get("warm"), fields.get("cache_salt")
    if warm is not None and not isinstance(warm, bool):
        raise InvalidArgumentError("warm", f"must be true or false, not {warm!r}"[:200])
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidArgumentError("cache_salt", "must be a non-empty string")
    return UploadOptions(read_ttl(fields.get("ttl_seconds")), bool(warm), salt)


def read_ttl(value: object, field: str = "ttl_seconds") -> float:
    """Check a lifetime that a caller gave, and return it in seconds; None means the default."""
    if value is None:
        return DEFAULT_TTL_SECONDS
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= MAX_TTL_SECONDS:
        limit = f"from 1 to {MAX_TTL_SECONDS:.0f}"
        raise InvalidArgumentError(field, f"must be a number of seconds {limit}, not {value!r}")
    return float(value)
