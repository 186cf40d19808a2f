"""Reads the query of a list: how many entries the caller wants, and their order; refuses parameters that it lacks."""

import re
from collections.abc import Sequence

from starlette.requests import Request

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError

# Limited to 9 digits, as Python refuses to parse thousands.
_NUMBER = re.compile(r"[0-9]{1,9}")


def refuse_unknown_parameters(http: Request, known: Sequence[str]) -> None:
    for name in http.query_params:
        if name not in known:
            raise UnsupportedFieldError(name[:80], f"is unknown; known: {', '.join(known)}")


def read_limit(http: Request, default: int, maximum: int) -> int:
    text = http.query_params.get("limit", str(default))
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= maximum:
        raise InvalidArgumentError("limit", f"must be from 1 to {maximum}, not {text[:20]!r}")
    return int(text)


def asks_ascending(http: Request) -> bool:
    order = http.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidArgumentError("order", f"must be asc or desc, not {order[:20]!r}")
    return order == "asc"
