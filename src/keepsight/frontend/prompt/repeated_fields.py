"""Leaves out of an answer's texts what a client repeats there of the answer itself.

OpenAI's Agents SDK for JavaScript puts all fields of a message that it received into the part that has its text. Only
a part with the role of an answer, in an answer, may do so: elsewhere these fields are unknown like any others.
"""

from collections.abc import Mapping
from typing import Any

from keepsight.frontend.prompt.check_fields import Fields

_ANSWERS = "assistant"
_REPEATED = frozenset({"role", "refusal", "reasoning", "reasoning_content", "tool_calls"})


def content_without_repeated(message: Fields) -> object:
    """Return the content of a message as it is, but its texts without the fields that they repeat."""
    content = message.get("content")
    if message.get("role") != _ANSWERS or not isinstance(content, list | tuple):
        return content
    return [_leave_out(part) if _repeats(part) else part for part in content]


def _repeats(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and part.get("role") == _ANSWERS


def _leave_out(part: Mapping[str, Any]) -> Fields:
    return {name: value for name, value in part.items() if name not in _REPEATED}
