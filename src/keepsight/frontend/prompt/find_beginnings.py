"""The rendered text of a conversation up to each breakpoint that its client set.

A breakpoint lies within the messages, and only the template knows what becomes of them. So the conversation is also
rendered with nothing said after the breakpoint: what both prompts have in common is taken to lie before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keepsight.errors import ChatTemplateError
from keepsight.frontend.prompt.read_messages import Conversation
from keepsight.frontend.prompt.render_prompt import ChatTemplate


class Beginning(NamedTuple):
    """The beginning of a prompt, followed by text that the prompt does not have, and for how long to keep it."""

    text: str
    seconds: float


def find_beginnings(
    template: ChatTemplate, conversation: Conversation, tools: Sequence[Mapping[str, Any]]
) -> Iterator[Beginning]:
    for each in conversation.breakpoints:
        try:
            text = template.render(conversation.emptied_after(each), tools=tools)
        except ChatTemplateError:
            continue  # the whole conversation was not refused, and a breakpoint must not make it fail
        yield Beginning(text, each.seconds)
