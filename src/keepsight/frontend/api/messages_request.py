"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`: chat requests under Anthropic's field names, which
are converted to chat requests.

Errors found after the conversion are reported under Anthropic's names.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from keepsight.frontend.api.chat_request import MediaProcessorOptions
from keepsight.frontend.api.generation_fields import OwnOptions
from keepsight.frontend.api.messages_fields import (
    ChosenTool,
    CustomTool,
    MessageMetadata,
    OutputConfig,
    Thinking,
)
from keepsight.frontend.api.renamed_chat import RenamedChat
from keepsight.frontend.http.decode_body import BodyDecoder, Buffer, NeutralValues, Refused, check_refused
from keepsight.frontend.prompt.lift_data_urls import decode_lifting
from keepsight.frontend.prompt.read_blocks import read_blocks
from keepsight.frontend.prompt.read_messages import CacheControl
from keepsight.frontend.prompt.reasoning_effort import SWITCHES


class MessagesChat(RenamedChat, frozen=True, kw_only=True):
    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        "continue_final_message": "messages",
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    def _name_of_tool(self, field: str) -> str:
        return field.replace(".parameters", ".input_schema", 1)


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a request that makes up its prompt. Null selects a field's default."""

    # `read_blocks` checks the shapes of both.
    messages: Any
    system: Any = None
    model: str | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    # Same as in chat requests.
    mm_processor_kwargs: MediaProcessorOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    context_management: Refused = None
    mcp_servers: Refused = None
    speed: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        # The last one is sent by Claude Code: all thinking is kept.
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    def as_chat(self) -> MessagesChat:
        check_refused(self)
        for index, tool in enumerate(self.tools or ()):
            check_refused(tool, f"tools[{index}]")
        return MessagesChat(**self._list_fields()).checked()

    def _list_fields(self) -> dict[str, Any]:
        """Return the fields of the chat request, by their names there."""
        thinking, choice = self.thinking, self.tool_choice
        # This is also what the field's absence asks for in Anthropic's API, so models that cannot but think do so.
        is_off = thinking is not None and thinking.type == "disabled"
        variables = dict.fromkeys(SWITCHES if is_off else (), False) | (self.chat_template_kwargs or {})
        conversation, places = read_blocks(self.messages, self.system, variables)
        form = None if self.output_config is None else self.output_config.format
        return {
            "model": self.model,
            "messages": conversation,
            "places": places,
            "tools": None if self.tools is None else [each.as_in_chat() for each in self.tools],
            "tool_choice": None if choice is None else choice.as_in_chat(),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "include_reasoning": False if thinking is not None and thinking.display == "omitted" else None,
            "response_format": None if form is None else form.as_in_chat(),
            "mm_processor_kwargs": self.mm_processor_kwargs,
            "cache_salt": self.cache_salt,
        }


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None

    # Same as in chat requests.
    priority: int | None = None
    prompt_cache_key: str | None = None
    keepsight: OwnOptions | None = None

    # Labels, not used.
    metadata: MessageMetadata | None = None
    user_profile_id: str | None = None

    container: Refused = None
    diagnostics: Refused = None
    inference_geo: Refused = None
    service_tier: Refused = None
    workspace_id: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        **CountTokensRequest.NEUTRAL_VALUES,
        "service_tier": ("auto", "standard_only"),
    }

    def _list_fields(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _SHARED}
        return super()._list_fields() | own | {"stop": self.stop_sequences}


_SHARED = ("max_tokens", "stream", "temperature", "top_p", "top_k", "priority", "prompt_cache_key", "keepsight")
_decoder, _count_decoder = BodyDecoder(MessagesRequest), BodyDecoder(CountTokensRequest)


def parse_messages_request(body: Buffer) -> MessagesChat:
    return decode_lifting(_decoder, body).as_chat()


def parse_count_tokens_request(body: Buffer) -> MessagesChat:
    return decode_lifting(_count_decoder, body).as_chat()
