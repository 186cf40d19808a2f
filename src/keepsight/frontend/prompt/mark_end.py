"""Finds where the last message's text ends in a rendered prompt, so that an answer continues it: by a mark there."""

from collections.abc import Mapping, Sequence
from typing import Any

from keepsight.errors import InvalidArgumentError

# Appended to a text that is to be continued. A template that trims removes its last character.
GOES_ON = "(and here the answer goes on) "


def mark_end(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    *before, last = messages
    return [*before, {**last, "content": _mark(last["content"])}]


def _mark(content: str | list[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    if isinstance(content, str):
        return content + GOES_ON
    if not content or content[-1]["type"] != "text":
        raise InvalidArgumentError("continue_final_message", "the last message does not end with text to continue")
    *before, last = content
    return [*before, {**last, "text": last["text"] + GOES_ON}]


def cut_at_mark(text: str, *, is_blank: bool) -> str:
    """Return the text before the mark as transformers does: a template that trimmed the mark would have trimmed the
    spaces before it, too. If the text to continue is blank, the spaces there are the template's own, which stay.
    """
    before, mark, behind = text.rpartition(GOES_ON.rstrip())
    if not mark:
        raise InvalidArgumentError("continue_final_message", "the chat template does not show the last message's text")
    return before if is_blank or behind.startswith(GOES_ON[-1]) else before.rstrip()
