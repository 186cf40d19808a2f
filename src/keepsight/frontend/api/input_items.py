"""The items that a stored response answers, as `/v1/responses/{id}/input_items` lists them."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.read_list_query import PageQuery

Item = dict[str, Any]


class InputItemPage(msgspec.Struct, frozen=True):
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputItems:
    """All items of a conversation in their order. Invariant: each has an id of its own, by which a page may begin."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}

    def add(self, items: Iterable[Item], response_id: str) -> None:
        """Add items of a turn. `response_id`: of its response, which no caller could know when it sent the items."""
        for item in items:
            name = item.get("id")
            if not isinstance(name, str) or name in self._items:
                name = f"item_{response_id.removeprefix('resp_')}_{len(self._items)}"
            self._items[name] = _complete(item) | {"id": name}

    def page(self, query: PageQuery) -> InputItemPage:
        names = [*self._items] if query.is_ascending else [*reversed(self._items)]
        if query.after is not None:
            if query.after not in self._items:
                raise InvalidArgumentError("after", f"must be the id of an item in this list, not {query.after[:80]!r}")
            names = names[names.index(query.after) + 1 :]
        shown = names[: query.limit]
        first, last = (shown[0], shown[-1]) if shown else (None, None)
        return InputItemPage([self._items[name] for name in shown], first, last, len(names) > query.limit)


def _complete(item: Item) -> Item:
    """Return an item with what callers may leave out, and OpenAI's lists have."""
    given = {name: value for name, value in item.items() if value is not None}
    completed = {"type": "message", "status": "completed"} | given
    if completed["type"] == "message":
        completed["content"] = _as_parts(item)
    return completed


def _as_parts(message: Mapping[str, Any]) -> object:
    content = message.get("content")
    if not isinstance(content, str):
        return content or []
    if message["role"] == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]
