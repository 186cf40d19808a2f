"""Joins the contents of messages: each is a text, or a list of parts, of which some are texts."""

from collections.abc import Mapping
from typing import Any

Content = str | list[Mapping[str, Any]]


def join_texts(content: Content) -> str:
    """Return a content's texts on lines of their own; as in vLLM, a text that is empty has none."""
    return content if isinstance(content, str) else "\n".join(filter(None, (part.get("text") for part in content)))


def join_contents(first: Content, second: Content, between: str = "\n\n") -> Content:
    """Join two contents. Adjacent texts become one: templates may trim each, and write nothing between two."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    *before, last = as_parts(first)
    following, *behind = as_parts(second)
    if last["type"] == following["type"] == "text":
        text = between.join(filter(None, (last["text"], following["text"])))
        return [*before, {**last, "text": text}, *behind]
    return [*before, last, following, *behind]


def as_parts(content: Content) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
