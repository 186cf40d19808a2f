"""Reads token ids that a caller gives in place of a text, with the integer types of any library."""

import operator

from keepsight.errors import InvalidArgumentError


def read_token_ids(token_ids: object, field: str) -> tuple[int, ...]:
    if not isinstance(token_ids, list | tuple):
        raise InvalidArgumentError(field, f"must be a list of token ids, not {type(token_ids).__name__}")
    return tuple(each if type(each) is int else _to_integer(each, field) for each in token_ids)


def _to_integer(value: object, field: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidArgumentError(field, f"{value!r} is not a token: it must be an integer") from error
