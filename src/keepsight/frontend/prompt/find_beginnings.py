"""What a template makes of a conversation up to each of its caller's breakpoints.

A breakpoint stands among the messages, and only the template knows what becomes of them: what a prompt has in common
with that of the conversation in which nothing is said behind it is taken to lie before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keepsight.errors import ChatTemplateError
from keepsight.frontend.prompt.read_messages import Conversation
from keepsight.frontend.prompt.render_prompt import ChatTemplate


class Beginning(NamedTuple):
    """Of a prompt, and behind it something that the prompt has not; for how long it is to be kept."""

    text: str
    seconds: float


def find_beginnings(
    template: ChatTemplate, conversation: Conversation, tools: Sequence[Mapping[str, Any]]
) -> Iterator[Beginning]:
    for each in conversation.breakpoints:
        try:
            text = template.render(conversation.emptied_after(each), tools=tools)
        except ChatTemplateError:
            continue  # the whole conversation was not refused, and a wish shall not be what fails it
        yield Beginning(text, each.seconds)
