"""Joins the contents of messages: each is a text, or a list of parts, of which some are texts."""

from collections.abc import Mapping, Sequence
from typing import Any

Content = str | list[Mapping[str, Any]]


def join_texts(content: Content) -> str:
    """Return a content's texts on lines of their own; as in vLLM, a text that is empty has none."""
    return content if isinstance(content, str) else "\n".join(filter(None, (part.get("text") for part in content)))


def join_all(contents: Sequence[Content], between: str = "\n\n") -> Content:
    """Join contents. Adjacent texts become one: templates may trim each, and write nothing between two.

    Each text is copied once, however many there are: a request may have thousands of messages.
    """
    given = [content for content in contents if content] or [contents[-1]]
    if len(given) == 1:
        return given[0]
    texts = [content for content in given if isinstance(content, str)]
    if len(texts) == len(given):
        return between.join(texts)
    runs: list[list[Mapping[str, Any]]] = []  # of parts; each becomes one
    for content in given:
        first, *others = as_parts(content)
        if runs and runs[-1][-1]["type"] == first["type"] == "text":
            runs[-1].append(first)
        else:
            runs.append([first])
        runs += ([each] for each in others)
    return [_join_parts(run, between) for run in runs]


def _join_parts(parts: Sequence[Mapping[str, Any]], between: str) -> Mapping[str, Any]:
    first, *others = parts
    return {**first, "text": between.join(filter(None, (part["text"] for part in parts)))} if others else first


def as_parts(content: Content) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
