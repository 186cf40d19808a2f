"""A JSON body becomes a struct.  Whatever is wrong with it is told by the name of the field, known or not."""

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.http.other_servers import ELSEWHERE, propose_field

Body = TypeVar("Body", bound=msgspec.Struct)
Buffer = bytes | bytearray | memoryview
# Of a field that clients know and this server does not implement.
Refused = Annotated[Any, msgspec.Meta(description="Not supported: only what asks for nothing is accepted.")]
MAX_SHOWN_CHARACTERS = 80
# Each value needs a comma or a bracket, and becomes an object of 50 bytes or more before its place can be looked at.
# Those within texts count too, so there is room for those of any prompt; token ids are cheap, and may be many.
MOST_OF_EACH = {b",": 2**23, b"[": 2**18, b"{": 2**18}
# What is looked at at a time: it stays in the processor's cache.
PIECE_BYTES = 2**16
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<at>.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*?)`(?: - at `\$\.?(?P<at>.*)`)?", re.DOTALL)
_AT_PATH = re.compile(r"(?P<message>.*) - at `\$\.?(?P<path>.*)`", re.DOTALL)
_NO_STRUCTS: Mapping[str, type[msgspec.Struct]] = MappingProxyType({})


class BodyDecoder(Generic[Body]):
    def __init__(self, body_type: type[Body], nested: Mapping[str, type[msgspec.Struct]] | None = None) -> None:
        """`nested`: structs by their path in a body, as far as they have names of their own to mistake."""
        self._decoder = msgspec.json.Decoder(body_type)
        self._structs: dict[str, type[msgspec.Struct]] = {"": body_type, **(nested or {})}

    def decode(self, body: Buffer) -> Body:
        check_num_values(body)
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise refusal_of(error, structs=self._structs) from error
        except UnicodeDecodeError as error:
            raise InvalidArgumentError("body", f"is not UTF-8: {_find_foreign(body) or error}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidArgumentError("body", f"is not JSON that can be read: {error}") from error


def refusal_of(
    error: msgspec.ValidationError, place: str = "", structs: Mapping[str, type[msgspec.Struct]] = _NO_STRUCTS
) -> InvalidArgumentError:
    """By the name of the field: msgspec puts its path behind the message.  `place`: where the value stands."""
    message = str(error)
    if unknown := _UNKNOWN_FIELD.fullmatch(message):
        return _refuse_unknown(unknown["name"], _join(place, unknown["at"] or ""), structs)
    if missing := _MISSING_FIELD.fullmatch(message):
        return InvalidArgumentError(_join(_join(place, missing["at"] or ""), missing["name"]), "is required")
    if placed := _AT_PATH.fullmatch(message):
        path = _join(place, placed["path"])
        return InvalidArgumentError(path or "body", placed["message"] + _tell_choices(path, structs))
    return InvalidArgumentError(place or "body", message)


def _tell_choices(path: str, structs: Mapping[str, type[msgspec.Struct]]) -> str:
    """Of a field that takes some words and no others: msgspec names none of them."""
    parent, _, name = path.rpartition(".")
    fields = msgspec.structs.fields(structs[parent]) if parent in structs else ()
    types = [each for field in fields if field.name == name for each in (field.type, *get_args(field.type))]
    words = [word for each in types if get_origin(each) is Literal for word in get_args(each)]
    return f"; it may be {' or '.join(map(repr, words))}" if words else ""


def _refuse_unknown(name: str, parent: str, structs: Mapping[str, type[msgspec.Struct]]) -> UnsupportedFieldError:
    name = name if len(name) <= MAX_SHOWN_CHARACTERS else name[: MAX_SHOWN_CHARACTERS - 3] + "..."
    known = _served_fields(structs[parent]) if parent in structs else ()
    meant = propose_field(name, known)
    hint = f"; did you mean {meant!r}?" if meant else ""
    return UnsupportedFieldError(_join(parent, name), f"is no field that this server knows{hint}")


def _find_foreign(body: Buffer) -> UnicodeDecodeError | None:
    """msgspec counts from the beginning of a text."""
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as error:
        return error
    return None


def check_num_values(body: Buffer) -> None:
    """Before any is made."""
    for mark, most in MOST_OF_EACH.items():
        if len(body) > most and _count(body, mark) > most:
            raise InvalidArgumentError(
                "body", f"has more than {most} of {mark.decode()!r}, in texts or outside: too many values to be read"
            )


def _count(body: Buffer, mark: bytes) -> int:
    return sum(bytes(body[at : at + PIECE_BYTES]).count(mark) for at in range(0, len(body), PIECE_BYTES))


def check_refused(request: msgspec.Struct, neutral_values: Mapping[str, tuple[Any, ...]], parent: str = "") -> None:
    """`Refused` fields pass with null, which asks for nothing, and with what `neutral_values` has for them."""
    for name in refused_fields(type(request)):
        value, neutral = getattr(request, name), neutral_values.get(name, ())
        if value is not None and not _is_neutral(value, neutral):
            taken = " or ".join(msgspec.json.encode(each).decode() for each in neutral)
            but_for = f" but for {taken}, which asks for nothing" if taken else ""
            hint = f"; {ELSEWHERE[name]} says the same" if name in ELSEWHERE else ""
            raise UnsupportedFieldError(_join(parent, name), f"is not supported by this server{but_for}{hint}")


@cache
def refused_fields(body_type: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(body_type) if field.type == Refused)


def _served_fields(body_type: type[msgspec.Struct]) -> list[str]:
    return [name for name in body_type.__struct_fields__ if name not in refused_fields(body_type)]


def _is_neutral(value: object, neutral_values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in neutral_values)


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent and name and not name.startswith("[") else parent + name
