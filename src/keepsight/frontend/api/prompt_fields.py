"""The fields of a request whose prompt is tokenized or embedded, but not continued.

The prompt is a text, or messages as in a chat, pictures included.
"""

from typing import Any, Self

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.chat_request import MediaProcessorOptions
from keepsight.frontend.api.tool_fields import Tool, check_tools
from keepsight.frontend.http.decode_body import Refused, check_refused
from keepsight.frontend.prompt.read_messages import choose_end, read_messages

_OF_MESSAGES = (
    "mm_processor_kwargs",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)


class PromptFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    # A `Conversation` once it is parsed.
    messages: Any = None
    cache_salt: str | None = None

    # Only with messages.
    mm_processor_kwargs: MediaProcessorOptions | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Refused = None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(each) for each in self.tools or ()]

    def check_one_of(self, name: str) -> None:
        """Check the fields. `name`: the field that holds a prompt without messages."""
        check_refused(self)
        check_tools(self.tools or ())
        if (getattr(self, name) is None) == (self.messages is None):
            raise InvalidArgumentError(name, f"exactly one of {name} and messages must be given")
        for each in _OF_MESSAGES:
            if self.messages is None and getattr(self, each) is not None:
                raise InvalidArgumentError(each, "applies to messages only, and a prompt has none")

    def with_read_messages(self, *, begins_answer: bool = True) -> Self:
        """Parse the messages. `begins_answer`: the default for whether the beginning of an answer follows them."""
        if self.messages is None:
            return self
        is_explicit = self.add_generation_prompt is not None or self.continue_final_message
        end = choose_end(self.add_generation_prompt if is_explicit else begins_answer, self.continue_final_message)
        return msgspec.structs.replace(self, messages=read_messages(self.messages, end, self.chat_template_kwargs))
