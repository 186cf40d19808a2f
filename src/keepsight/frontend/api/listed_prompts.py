"""A field of a body that holds a prompt, or a list of them, each a text or token ids: of completions and embeddings."""

from typing import Any, TypeGuard

Prompt = str | list[int]


def is_prompt(value: object) -> TypeGuard[Prompt]:
    """One of them; of token ids none is looked at but for its type."""
    are_ids = isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    return are_ids or isinstance(value, str)


def name_prompts(field: str, value: str | list[Any] | None) -> dict[str, Any]:
    """By what the caller calls each, which may be no prompt."""
    if value is None:
        return {}
    return {field: value} if is_prompt(value) else {f"{field}[{index}]": each for index, each in enumerate(value)}
