"""Reads the query parameter `limit`: how many entries of a list the caller wants."""

import re

from starlette.requests import Request

from keepsight.errors import InvalidArgumentError

# Limited to 9 digits, as Python refuses to parse thousands.
_NUMBER = re.compile(r"[0-9]{1,9}")


def read_limit(http: Request, default: int, maximum: int) -> int:
    text = http.query_params.get("limit", str(default))
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= maximum:
        raise InvalidArgumentError("limit", f"must be from 1 to {maximum}, not {text[:20]!r}")
    return int(text)
