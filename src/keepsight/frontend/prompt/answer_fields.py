"""The fields of an answer that a client sends back, and what it repeats of them in the answer's texts.

OpenAI's Agents SDK for JavaScript puts all fields of a message that it received into the part that has its text. Only
a part with the role of an answer, in an answer, may do so: elsewhere these fields are unknown like any others.
"""

from collections.abc import Mapping
from typing import Any

from keepsight.frontend.prompt.check_fields import Fields, says_nothing

# Clients send an assistant's earlier answer back whole; these of its fields have no meaning when they are empty.
# Nor has the last, which is of tools, in other roles: some clients write every field of every message.
EMPTY_IN_ANSWERS = (
    "annotations",
    "audio",
    "function_call",
    "parsed",
    "provider_specific_fields",
    "reasoning",
    "reasoning_content",
    "refusal",
    "tool_calls",
    "tool_call_id",
)
# The first is the name that templates know; an answer has both, and clients send back either or both.
THOUGHT_NAMES = ("reasoning_content", "reasoning")
# `parsed` is added by OpenAI's own client: the content, which is sent, too.
FIELDS_OF_ANSWERS = ("parsed", *THOUGHT_NAMES, "refusal", "tool_calls")
_ROLE = "assistant"


def content_without_repeated(message: Fields) -> object:
    """Return the content of a message as it is, but its texts without the fields that they repeat."""
    content = message.get("content")
    if message.get("role") != _ROLE or not isinstance(content, list | tuple):
        return content
    return [_leave_out(part) if _repeats(part) else part for part in content]


def _repeats(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("text", "refusal") and part.get("role") == _ROLE


def _leave_out(part: Mapping[str, Any]) -> Fields:
    """Return the part without what it repeats. A refusal's has its text under a name that is also an answer's."""
    return {name: value for name, value in part.items() if name == part["type"] or not _is_repeated(name, value)}


def _is_repeated(name: str, value: object) -> bool:
    return name in ("role", *FIELDS_OF_ANSWERS) or (name in ("content", *EMPTY_IN_ANSWERS) and says_nothing(value))
