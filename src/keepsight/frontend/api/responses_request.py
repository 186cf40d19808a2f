"""The body of `POST /v1/responses`: a chat request under other field names, which is converted to a chat request.

Errors found after the conversion are reported under the names of the Responses API.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.api.chat_request import MediaProcessorOptions
from keepsight.frontend.api.generation_fields import GenerationFields
from keepsight.frontend.api.renamed_chat import RenamedChat
from keepsight.frontend.api.responses_fields import (
    AllowedFunctions,
    ChosenFunction,
    FunctionTool,
    Includable,
    Reasoning,
    ResponsesStreamOptions,
    TextFormat,
    TextOptions,
)
from keepsight.frontend.http.decode_body import BodyDecoder, Buffer, NeutralValues, Refused, check_refused
from keepsight.frontend.prompt.lift_data_urls import decode_lifting
from keepsight.frontend.prompt.read_items import read_items

LOGPROBS = "message.output_text.logprobs"
# OpenAI's limits on metadata, which the answer repeats.
MAX_LABELS, MAX_LABEL_NAME, MAX_LABEL = 16, 64, 512
# Limit on a field that the answer repeats, in bytes of JSON: they are held until the answer is finished.
MAX_ECHOED_BYTES = 2**20


class ResponsesRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A text, or items; `read_items` checks their shapes.
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    include: list[Includable] | None = None
    top_logprobs: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponsesStreamOptions | None = None  # type: ignore[assignment]
    reasoning: Reasoning | None = None
    mm_processor_kwargs: MediaProcessorOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None

    # Unless false, later requests may continue from the answer.
    store: bool | None = None
    previous_response_id: str | None = None

    # Codex's labels, which are in each of its requests. Like other labels they never change an answer.
    client_metadata: dict[str, Any] | None = None

    # Fields of chat and completion requests.
    guided_choice: Refused = None
    guided_grammar: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    max_tokens: Refused = None
    n: Refused = None
    prompt_logprobs: Refused = None
    response_format: Refused = None
    return_token_ids: Refused = None

    access_programs: Refused = None
    background: Refused = None
    context_management: Refused = None
    conversation: Refused = None
    image: Refused = None
    max_tool_calls: Refused = None
    media_io_kwargs: Refused = None
    prompt: Refused = None
    service_tier: Refused = None
    truncation: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        **GenerationFields.NEUTRAL_VALUES,
        "background": (False,),
        "context_management": ([],),
        "media_io_kwargs": ({},),
        "n": (1,),
        "return_token_ids": (False,),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }

    def check(self) -> None:
        check_refused(self)
        for name in ("text", "stream_options"):
            if (nested := getattr(self, name)) is not None:
                check_refused(nested, name)
        for index, tool in enumerate(self.tools or ()):
            check_refused(tool, f"tools[{index}]")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "needs stream to be true")
        if self.top_logprobs and not self._wants_logprobs:
            raise InvalidArgumentError("top_logprobs", f"is {self.top_logprobs}, which needs {LOGPROBS!r} in include")
        self._check_labels()
        for name in ("tools", "tool_choice", "text"):
            if len(written := _write(getattr(self, name), name)) > MAX_ECHOED_BYTES:
                what = f"has {len(written)} bytes; it may have at most {MAX_ECHOED_BYTES}, as answers repeat it"
                raise InvalidArgumentError(name, what)

    def _check_labels(self) -> None:
        labels = self.metadata or {}
        if len(labels) > MAX_LABELS:
            raise InvalidArgumentError("metadata", f"must have at most {MAX_LABELS} entries, not {len(labels)}")
        for name, label in labels.items():
            if len(name) > MAX_LABEL_NAME or (isinstance(label, str) and len(label) > MAX_LABEL):
                reason = f"must have a name of at most {MAX_LABEL_NAME} characters, and at most {MAX_LABEL} of text"
                raise InvalidArgumentError(f"metadata[{name!r:.80}]", reason)

    def check_stores_nothing(self) -> None:
        """Refuse fields that need stored responses, for a server that stores none."""
        for name, value in (("store", self.store or None), ("previous_response_id", self.previous_response_id)):
            if value is not None:
                raise UnsupportedFieldError(name, "needs --response-quota-mb: this server keeps no responses")

    def as_chat(self, before: Sequence[Any] = ()) -> "ResponsesChat":
        """Convert to a chat request. `before`: the items of the conversation that it continues."""
        effort = None if self.reasoning is None else self.reasoning.effort
        conversation, places = read_items(self.input, self.instructions, before, self.chat_template_kwargs)
        form = None if self.text is None or self.text.format is None else self.text.format.as_in_chat()
        choice = self.tool_choice
        return ResponsesChat(
            **{name: getattr(self, name) for name in _SHARED},
            messages=replace(conversation, effort=effort),
            max_completion_tokens=self.max_output_tokens,
            response_format=form,
            logprobs=self._wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            tools=None if self.tools is None else [each.as_in_chat() for each in self.tools],
            tool_choice=choice if isinstance(choice, str | None) else choice.as_in_chat(),
            parallel_tool_calls=self.parallel_tool_calls,
            mm_processor_kwargs=self.mm_processor_kwargs,
            include_reasoning=self.include_reasoning,
            places=places,
            echo=self._repeat(),
        ).checked()

    @property
    def _wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def _repeat(self) -> "Echo":
        form = TextFormat("text") if self.text is None or self.text.format is None else self.text.format
        return Echo(
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            metadata=self.metadata or {},
            parallel_tool_calls=self.parallel_tool_calls is not False,
            previous_response_id=self.previous_response_id,
            prompt_cache_key=self.prompt_cache_key,
            text=_write({"format": form}, "text"),
            tool_choice=_write(self.tool_choice or "auto", "tool_choice"),
            tools=_write(self.tools or [], "tools"),
            top_logprobs=self.top_logprobs or 0,
        )


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that its answer repeats."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    # JSON, which is smaller than the decoded objects.
    text: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    top_logprobs: int


class ResponsesChat(RenamedChat, frozen=True, kw_only=True):
    echo: Echo

    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }

    def _name_of_tool(self, field: str) -> str:
        return field.replace(".allowed_tools", "", 1)


_SHARED = tuple(
    field.name
    for field in msgspec.structs.fields(ResponsesRequest)
    if field.name in GenerationFields.__struct_fields__ and field.type != Refused and field.name != "stream_options"
)
_decoder = BodyDecoder(ResponsesRequest)


def parse_responses_request(body: Buffer) -> ResponsesRequest:
    request = decode_lifting(_decoder, body, "input")
    request.check()
    return request


def _write(value: object, field: str) -> msgspec.Raw:
    """Write JSON, which needs a little more of the stack than to read it."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except RecursionError as error:
        raise InvalidArgumentError(field, "is nested too deeply") from error
