"""Checks the types of the values in a message; an error names the field as the client wrote it."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.http.other_servers import propose_field

Fields = Mapping[str, Any]
# Where a request says how all its pictures are shown; some libraries say it within the part of each.
_OF_ALL_PICTURES = ("mm_processor_kwargs",)


def refuse(field: str, value: object, expected: str) -> NoReturn:
    shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    raise InvalidArgumentError(field, f"must be {expected}, not {shown if len(shown) <= 80 else shown[:77] + '...'}")


def check_is_list(value: object, field: str, of_what: str) -> Sequence[object]:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        refuse(field, value, f"a list of {of_what}")
    if not value:
        raise InvalidArgumentError(field, f"must be a list of {of_what}, not an empty one")
    return value


def check_is_object(value: object, field: str) -> Fields:
    if not isinstance(value, Mapping):
        refuse(field, value, "an object")
    return value


def check_is_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        refuse(field, value, "a string")
    return str(value)  # a plain str: the template must not see methods of a subclass


def check_is_url(value: object, field: str) -> None:
    if not isinstance(value, str) or not value:
        refuse(field, value, "a URL")


def check_fields(value: Fields, field: str, known: set[str], known_when_empty: Sequence[str] = ()) -> None:
    for name, content in value.items():
        if name in known or (name in known_when_empty and says_nothing(content)):
            continue
        fault = "is not supported by this server" if name in known_when_empty else _describe_unknown(name, known)
        raise UnsupportedFieldError(f"{field}.{name}", fault)


def _describe_unknown(name: object, known: set[str]) -> str:
    meant = propose_field(str(name), _OF_ALL_PICTURES)
    hint = f"did you mean {meant!r} of the whole request?" if meant else f"known: {sorted(known)}"
    return f"is unknown; {hint}"


def says_nothing(content: object) -> bool:
    if isinstance(content, Mapping):
        return all(each is None for each in content.values())
    return content is None or content in ("", [])
