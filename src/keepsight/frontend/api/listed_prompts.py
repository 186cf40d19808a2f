"""Fields that hold one prompt or a list of prompts, each a text or token ids, as in completions and embeddings."""

from typing import Any, TypeGuard

Prompt = str | list[int]


def is_prompt(value: object) -> TypeGuard[Prompt]:
    """Return whether a value is one prompt. Only the types of token ids are checked."""
    are_ids = isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    return are_ids or isinstance(value, str)


def name_prompts(field: str, value: str | list[Any] | None) -> dict[str, Any]:
    """Return the prompts keyed by their names in the request. Elements of a list may be invalid."""
    if value is None:
        return {}
    return {field: value} if is_prompt(value) else {f"{field}[{index}]": each for index, each in enumerate(value)}
