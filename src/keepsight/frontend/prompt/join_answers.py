"""Joins consecutive messages into which a client has split one answer.

OpenAI's Responses API has a thought, a text and calls as separate items, and clients that think in items, such as its
Agents SDK for JavaScript, send each as a message of its own in chats, too. A template would show them as several turns,
or refuse them; joined they are the answer as the model wrote it, which the prefix cache holds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from keepsight.frontend.prompt.answer_fields import THOUGHT_NAMES

_THOUGHT = THOUGHT_NAMES[0]


def join_answers(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, all of which have been read. Two texts stay apart: no answer consists of two."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if not joined or not _are_one(joined[-1], message):
            joined.append({**message})
            if "tool_calls" in message:
                joined[-1]["tool_calls"] = [*message["tool_calls"]]
            continue
        if _says_nothing(joined[-1]):
            joined[-1]["content"] = message["content"]
        if _THOUGHT in message:
            joined[-1][_THOUGHT] = message[_THOUGHT]
        if "tool_calls" in message:
            joined[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
    return joined


def _are_one(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether the second message goes on with the answer of the first: a thought begins one, calls end it.

    A message may be empty because its thought was not sent.
    """
    if not first["role"] == second["role"] == "assistant" or first.get("name") != second.get("name"):
        return False
    is_begun = "tool_calls" not in first and _says_nothing(first)
    if _THOUGHT in second:
        return is_begun and _THOUGHT not in first
    return is_begun or ("tool_calls" in second and _says_nothing(second))


def _says_nothing(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    return not content or (not isinstance(content, str) and all(part.get("text") == "" for part in content))
