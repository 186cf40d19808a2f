"""Decodes a JSON body into a struct. Errors name the field at fault, known or not."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.http.other_servers import FIELD_ALTERNATIVES, FIELD_FAULTS, propose_field

Body = TypeVar("Body", bound=msgspec.Struct)
_Kind = TypeVar("_Kind")
Buffer = bytes | bytearray | memoryview
# The type of a field that clients know but this server does not implement.
Refused = Annotated[Any, msgspec.Meta(description="Not supported: only values without effect are accepted.")]
# The type of a struct's `NEUTRAL_VALUES`: for each such field, the values besides null that ask for nothing.
NeutralValues = Mapping[str, tuple[Any, ...]]
MAX_SHOWN_CHARACTERS = 80
# Each value needs a comma, a bracket or a colon, and becomes an object of 50 bytes or more before it can be checked; no
# other request is served meanwhile. Those in strings count too, so the limits leave room for those of any prompt.
# Token ids are cheap, and may be many; a member of an object takes 30 times as long.
MAX_MARKS_IN_BODY = {b",": 2**23, b"[": 2**18, b"{": 2**18, b":": 2**20}
# Bytes to scan at a time: they stay in the processor's cache.
PIECE_BYTES = 2**16
# Some programs put it before a text; JSON's readers may ignore it.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Two escapes and a little more: behind one half, msgspec expects the six bytes of the other.
MAX_BYTES_OF_END = 16
_HALF_OF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<at>.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*?)`(?: - at `\$\.?(?P<at>.*)`)?", re.DOTALL)
_AT_PATH = re.compile(r"(?P<message>.*) - at `\$\.?(?P<path>.*)`", re.DOTALL)
_INDEX = re.compile(r"\[[^\]]*\]")


class BodyDecoder(Generic[Body]):
    def __init__(self, body_type: type[Body]) -> None:
        self._body_type, self._decoder = body_type, msgspec.json.Decoder(body_type)

    def decode(self, body: Buffer) -> Body:
        check_num_values(body)
        try:
            return self._decoder.decode(without_mark(body))
        except msgspec.ValidationError as error:
            raise _refusal_of(error, self._body_type) from error
        except UnicodeDecodeError as error:
            raise InvalidArgumentError("body", f"is not UTF-8: {_find_foreign(body) or error}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            is_half = "truncated" in str(error) and _ends_with_half_of_pair(body)
            reason = "half of a surrogate pair, which is no character" if is_half else str(error)
            raise InvalidArgumentError("body", f"cannot be read as JSON: {reason}") from error


def without_mark(body: Buffer) -> Buffer:
    return memoryview(body)[len(_BYTE_ORDER_MARK) :] if body[: len(_BYTE_ORDER_MARK)] == _BYTE_ORDER_MARK else body


def convert(value: object, kind: type[_Kind], place: str) -> _Kind:
    """Return a part of a body that was decoded without types as one of this type. `place`: its path."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal_of(error, kind, place) from error


def _refusal_of(error: msgspec.ValidationError, kind: object, place: str = "") -> InvalidArgumentError:
    """Return an error that names the field: msgspec appends its path to the message.

    `kind`: the type decoded; `place`: the path of what was decoded.
    """
    message = str(error)
    if unknown := _UNKNOWN_FIELD.fullmatch(message):
        at = unknown["at"] or ""
        return _refuse_unknown(unknown["name"], _join(place, at), _structs(_find_types(kind, at)))
    if missing := _MISSING_FIELD.fullmatch(message):
        return InvalidArgumentError(_join(_join(place, missing["at"] or ""), missing["name"]), "is required")
    if placed := _AT_PATH.fullmatch(message):
        path = placed["path"]
        return InvalidArgumentError(_join(place, path) or "body", placed["message"] + _describe_choices(kind, path))
    return InvalidArgumentError(place or "body", message)


def _find_types(kind: object, path: str) -> list[Any]:
    """Return all types that the value at `path` may have or contain."""
    types: list[Any] = [*_unfold(kind)]
    for name in filter(None, _INDEX.sub("", path).split(".")):
        fields = (field for each in _structs(types) for field in msgspec.structs.fields(each) if field.name == name)
        types = [each for field in fields for each in _unfold(field.type)]
    return types


def _unfold(kind: object) -> Iterator[object]:
    yield kind
    for each in get_args(kind):
        yield from _unfold(each)


def _structs(types: Sequence[Any]) -> list[type[msgspec.Struct]]:
    return [each for each in types if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def _describe_choices(kind: object, path: str) -> str:
    """Describe the words that a field may take, if it takes only certain words: msgspec names none of them."""
    parent, _, name = path.rpartition(".")
    words = [word for each in _find_types(kind, path) if get_origin(each) is Literal for word in get_args(each)]
    configs = [each.__struct_config__ for each in _structs(_find_types(kind, parent))]
    words += [config.tag for config in configs if config.tag_field == name]
    return f"; it may be {' or '.join(map(repr, words))}" if words else ""


def _refuse_unknown(name: str, parent: str, structs: Sequence[type[msgspec.Struct]]) -> UnsupportedFieldError:
    name = name if len(name) <= MAX_SHOWN_CHARACTERS else name[: MAX_SHOWN_CHARACTERS - 3] + "..."
    meant = propose_field(name, [field for each in structs for field in _served_fields(each)])
    hint = f"; did you mean {meant!r}?" if meant else ""
    return UnsupportedFieldError(_join(parent, name), FIELD_FAULTS.get(name, f"is not a field of this API{hint}"))


def _ends_with_half_of_pair(body: Buffer) -> bool:
    """Return whether a body is whole but for a surrogate near its end: msgspec calls it truncated within the pair."""
    end = bytes(body[-MAX_BYTES_OF_END:]).rstrip()
    return end.endswith(b"}") and _HALF_OF_PAIR.search(end) is not None


def _find_foreign(body: Buffer) -> UnicodeDecodeError | None:
    """Return the UTF-8 error with its offset in the body: msgspec counts from the beginning of a string."""
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as error:
        return error
    return None


def check_num_values(body: Buffer) -> None:
    """Refuse a body with too many values before any is created."""
    for mark, most in MAX_MARKS_IN_BODY.items():
        if len(body) > most and _count(body, mark) > most:
            raise InvalidArgumentError(
                "body", f"has more than {most} of {mark.decode()!r}, inside strings or outside: too many values to read"
            )


def _count(body: Buffer, mark: bytes) -> int:
    return sum(bytes(body[at : at + PIECE_BYTES]).count(mark) for at in range(0, len(body), PIECE_BYTES))


def check_refused(request: msgspec.Struct, parent: str = "") -> None:
    """Check that each `Refused` field is null, which asks for nothing, or has a neutral value."""
    neutral_values = neutral_values_of(type(request))
    for name, attribute in refused_fields(type(request)).items():
        value, neutral = getattr(request, attribute), neutral_values.get(name, ())
        if value is not None and not _is_neutral(value, neutral):
            taken = " or ".join(msgspec.json.encode(each).decode() for each in neutral)
            but_for = f" except for {taken}, which has no effect" if taken else ""
            hint = f"; {FIELD_ALTERNATIVES[name]} does the same" if name in FIELD_ALTERNATIVES else ""
            raise UnsupportedFieldError(_join(parent, name), f"is not supported by this server{but_for}{hint}")


@cache
def refused_fields(body_type: type[msgspec.Struct]) -> Mapping[str, str]:
    """Return the attributes of these fields by their names in JSON, where one may be a keyword of Python's."""
    return {each.encode_name: each.name for each in msgspec.structs.fields(body_type) if each.type == Refused}


def neutral_values_of(body_type: type[msgspec.Struct]) -> NeutralValues:
    return getattr(body_type, "NEUTRAL_VALUES", {})


def _served_fields(body_type: type[msgspec.Struct]) -> list[str]:
    return [name for name in body_type.__struct_encode_fields__ if name not in refused_fields(body_type)]


def _is_neutral(value: object, neutral_values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in neutral_values)


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent and name and not name.startswith("[") else parent + name
