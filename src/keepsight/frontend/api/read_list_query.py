"""Reads the query of a list: how many entries the caller wants, and their order; refuses parameters that it lacks."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from starlette.requests import Request

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError

# Of OpenAI's lists.
DEFAULT_PAGE, MAX_PAGE = 20, 100
PAGE_PARAMETERS = ("limit", "after", "order")
# Limited to 9 digits, as Python refuses to parse thousands.
_NUMBER = re.compile(r"[0-9]{1,9}")


class PageQuery(NamedTuple):
    """What `PAGE_PARAMETERS` ask for."""

    limit: int
    after: str | None
    is_ascending: bool


def read_page_query(http: Request) -> PageQuery:
    return PageQuery(read_limit(http, DEFAULT_PAGE, MAX_PAGE), http.query_params.get("after"), asks_ascending(http))


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
