"""Makes one page of the pages of uploads that several servers list, in OpenAI's, Anthropic's or Keepsight's form.

Ids are ordered by time, and a page may begin after the id of an upload that the server never had. So each server is
asked for the page that the client wants, and the first of all that they list are that page.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keepsight.errors import NoReplicaError

Page = dict[str, Any]


class _Upload(msgspec.Struct):
    id: str


class _Page(msgspec.Struct):
    """What every list has."""

    data: list[_Upload]
    has_more: bool


_DEFAULT_LIMITS = {"/v1/media": 20, "/v1/files": 10_000}
_ANTHROPICS_DEFAULT_LIMIT = 20
LIST_PATHS = _DEFAULT_LIMITS.keys()


def read_page(body: bytes) -> Page:
    try:
        msgspec.json.decode(body, type=_Page)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NoReplicaError(f"a server behind this address does not list its uploads: {error}") from error
    page: Page = msgspec.json.decode(body)
    return page


def merge_lists(path: str, query: Mapping[str, str], pages: Sequence[Page]) -> Page:
    """`query`: has passed the servers' checks."""
    is_anthropics, is_backward = "next_page" in pages[0], "before_id" in query
    # A server that is behind the router by two names lists all of its uploads twice.
    uploads = {str(upload["id"]): upload for page in pages for upload in page["data"]}
    found = [uploads[name] for name in sorted(uploads, reverse=query.get("order") != "asc")]
    limit = int(query.get("limit", _ANTHROPICS_DEFAULT_LIMIT if is_anthropics else _DEFAULT_LIMITS[path]))
    if "ids[]" in query:
        limit = len(found)
    shown = found[max(0, len(found) - limit) :] if is_backward else found[:limit]
    has_more = len(found) > limit or any(page["has_more"] for page in pages)
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    merged = pages[0] | {"data": shown, "has_more": has_more, **ends}
    if is_anthropics:
        merged["next_page"] = f"page_{merged['last_id']}" if has_more and not is_backward else None
    return merged
