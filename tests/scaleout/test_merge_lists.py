"""The pages of several servers make the page that one server with all their uploads would list."""

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import NoReplicaError
from keepsight.scaleout.merge_lists import merge_lists, read_page

Page = dict[str, Any]


def list_page(ids: list[str], query: dict[str, str], is_anthropics: bool) -> Page:
    """What one server lists."""
    start = query.get("after") or query.get("after_id") or query.get("before_id")
    is_ascending = query.get("order") == "asc" or "before_id" in query
    ordered = sorted(ids, reverse=not is_ascending)
    beyond = [each for each in ordered if not start or (each > start if is_ascending else each < start)]
    limit = int(query["limit"])
    shown, has_more = beyond[:limit], len(beyond) > limit
    shown = shown[::-1] if "before_id" in query else shown
    ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
    page: Page = {"data": [{"id": each} for each in shown], "has_more": has_more, **ends}
    if is_anthropics:
        page["next_page"] = f"page_{ends['last_id']}" if has_more and "before_id" not in query else None
    return page


@given(
    st.lists(st.lists(st.integers(0, 9).map(str), unique=True), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from([{}, {"order": "asc"}, {"after": "5"}, {"after": "5", "order": "asc"}]),
)
def test_a_page_is_that_of_one_server_with_all_uploads(
    held: list[list[str]], limit: int, terms: dict[str, str]
) -> None:
    own = [[f"{each}{number}" for each in ids] for number, ids in enumerate(held)]
    query = {"limit": str(limit), **terms}
    pages = [list_page(ids, query, is_anthropics=False) for ids in own]
    assert merge_lists("/v1/media", query, pages) == list_page([*chain(*own)], query, is_anthropics=False)


@given(
    st.lists(st.lists(st.integers(0, 9).map(str), unique=True), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from([{}, {"after_id": "5"}, {"before_id": "5"}]),
)
def test_so_it_is_in_anthropics_form(held: list[list[str]], limit: int, terms: dict[str, str]) -> None:
    own = [[f"{each}{number}" for each in ids] for number, ids in enumerate(held)]
    query = {"limit": str(limit), **terms}
    pages = [list_page(ids, query, is_anthropics=True) for ids in own]
    assert merge_lists("/v1/files", query, pages) == list_page([*chain(*own)], query, is_anthropics=True)


@pytest.mark.parametrize(("path", "default"), [("/v1/media", 20), ("/v1/files", 10_000)])
def test_without_a_limit_a_page_has_as_many_as_a_server_lists(path: str, default: int) -> None:
    page = {
        "data": [{"id": f"{number:05}"} for number in range(default)],
        "first_id": "",
        "last_id": "",
        "has_more": False,
    }
    other = {"data": [{"id": "z"}], "first_id": "z", "last_id": "z", "has_more": False}
    merged = merge_lists(path, {}, [page, other])
    assert (len(merged["data"]), merged["has_more"], merged["first_id"]) == (default, True, "z")


def test_an_upload_that_is_listed_twice_is_one() -> None:
    page = list_page(["1", "2", "3"], {"limit": "3"}, is_anthropics=False)
    assert merge_lists("/v1/media", {"limit": "3"}, [page, page]) == page


def test_uploads_that_were_named_are_all_listed() -> None:
    pages = [{"data": [{"id": each}], "has_more": False, "next_page": None} for each in "ab"]
    assert [each["id"] for each in merge_lists("/v1/files", {"ids[]": "b"}, pages)["data"]] == ["b", "a"]


def test_a_deeply_nested_page_is_none() -> None:
    with pytest.raises(NoReplicaError):
        read_page(b'{"data":[],"has_more":false,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
