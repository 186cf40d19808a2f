"""The body of `POST /v1/chat/completions`: OpenAI's fields and vLLM's extra ones, become messages and SamplingParams.

Nothing is ignored: a field that this server does not implement is refused by name, unless its value asks for nothing.
Ranges of sampling values belong to SamplingParams, the shape of messages to `read_messages`.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import msgspec

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.response_format import (
    JsonSchema,
    ResponseFormat,
    StructuredOutputs,
    read_structured_outputs,
)
from keepsight.sampling_params import SamplingParams

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<at>.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*?)`(?: - at `\$\.?(?P<at>.*)`)?", re.DOTALL)
_AT_PATH = re.compile(r"(?P<message>.*) - at `\$\.?(?P<path>.*)`", re.DOTALL)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk
    include_obfuscation: bool | None = None


class MediaProcessorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`mm_processor_kwargs`, as far as one request may choose them."""

    do_pan_and_scan: bool | None = None


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class _RefusedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that clients know and this server does not implement: only the values in `_NEUTRAL_VALUES` pass."""

    add_generation_prompt: Any = None
    add_special_tokens: Any = None
    audio: Any = None
    bad_words: Any = None
    best_of: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_breakpoint: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prompt_logprobs: Any = None
    reasoning_effort: Any = None
    request_id: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    service_tier: Any = None
    spaces_between_special_tokens: Any = None
    store: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    verbosity: Any = None
    web_search_options: Any = None


# Besides null, which asks for nothing everywhere.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # calls are not told apart from text
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}


class ChatRequest(_RefusedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked for, with null wherever the default was."""

    messages: Any  # read_messages() knows their shape, and their paths better than a decoder does
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    mm_processor_kwargs: MediaProcessorOptions | None = None

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    # Shown to the model if its chat template has a place for them; what it makes of them is text like any other.
    tools: list[Tool] | None = None
    tool_choice: Any = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # Whom caches are shared with, and who goes first (smaller).
    cache_salt: str | None = None
    priority: int | None = None

    # Labels and hints: by their own definition they never change an answer.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """As a chat template sees them.  Whoever wants none to be called had best not show any."""
        shown = () if self.tool_choice == "none" else self.tools or ()
        return [msgspec.to_builtins(each) for each in shown]

    @property
    def do_pan_and_scan(self) -> bool | None:
        """None: as the server is configured."""
        return None if self.mm_processor_kwargs is None else self.mm_processor_kwargs.do_pan_and_scan

    def to_sampling_params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """`defaults`: where the request says nothing; no `max_tokens` at all is as much as the context holds."""
        asked = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        guided = {name: getattr(self, name) for name in _GUIDED_FIELDS}
        asked["structured_outputs"] = read_structured_outputs(self.response_format, self.structured_outputs, guided)
        if (max_tokens := self._choose_max_tokens()) is not None:
            asked["max_tokens"] = max_tokens
        return SamplingParams(**{"max_tokens": None, **defaults, **asked, "logprobs": self._choose_logprobs()})

    def _choose_max_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidArgumentError("max_tokens", f"is {old}, but max_completion_tokens, its new name, is {new}")
        return old if new is None else new

    def _choose_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidArgumentError("top_logprobs", f"is {self.top_logprobs}, which needs logprobs to be true")
        return None


_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_DECODER = msgspec.json.Decoder(ChatRequest)
# By their path in a body, as far as they have names of their own to mistake.
_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "stream_options": StreamOptions,
    "mm_processor_kwargs": MediaProcessorOptions,
    "response_format": ResponseFormat,
    "response_format.json_schema": JsonSchema,
    "structured_outputs": StructuredOutputs,
}


def parse_chat_request(body: bytes) -> ChatRequest:
    try:
        request = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        _refuse_invalid(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError("body", f"is not JSON that can be read: {error}") from error
    _check_refused_fields(request)
    _check_stream_options(request)
    if request.tool_choice not in (None, "none", "auto"):
        raise UnsupportedFieldError("tool_choice", "only 'none' and 'auto' are supported: no call is ever forced")
    return request


def _refuse_invalid(message: str) -> NoReturn:
    """Names the field: msgspec puts its path behind its message."""
    if unknown := _UNKNOWN_FIELD.fullmatch(message):
        _refuse_unknown(unknown["name"], unknown["at"] or "")
    if missing := _MISSING_FIELD.fullmatch(message):
        parent = missing["at"] or ""
        raise InvalidArgumentError(f"{parent}.{missing['name']}" if parent else missing["name"], "is required")
    if placed := _AT_PATH.fullmatch(message):
        raise InvalidArgumentError(placed["path"] or "body", placed["message"])
    raise InvalidArgumentError("body", message)


def _refuse_unknown(name: str, parent: str) -> NoReturn:
    name = name if len(name) <= 80 else name[:77] + "..."
    known = _STRUCTS.get(parent, ChatRequest)
    close = get_close_matches(name, known.__struct_fields__, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UnsupportedFieldError(f"{parent}.{name}" if parent else name, f"is no field that this server knows{hint}")


def _check_refused_fields(request: ChatRequest) -> None:
    for name in _RefusedFields.__struct_fields__:
        value = getattr(request, name)
        if value is not None and not _is_neutral(value, _NEUTRAL_VALUES.get(name, ())):
            raise UnsupportedFieldError(name, "is not supported by this server")


def _is_neutral(value: object, neutral_values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in neutral_values)


def _check_stream_options(request: ChatRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise InvalidArgumentError("stream_options", "needs stream to be true")
    for name in ("continuous_usage_stats", "include_obfuscation"):
        if getattr(options, name):
            raise UnsupportedFieldError(f"stream_options.{name}", "is not supported by this server")
