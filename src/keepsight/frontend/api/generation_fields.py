"""Request fields that chats and completions share, under OpenAI's and vLLM's names; they become SamplingParams.

Nothing is ignored: a field that this server does not implement is refused by name, unless its value asks for nothing.
SamplingParams checks the ranges of sampling values.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

import msgspec

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError, renaming_fields
from keepsight.frontend.api.response_format import (
    RequestedForm,
    ResponseFormat,
    StructuredOutputs,
    list_forms,
    read_structured_outputs,
)
from keepsight.frontend.api.tool_fields import CallTerms
from keepsight.frontend.http.decode_body import NeutralValues, Refused, check_refused
from keepsight.sampling_params import SamplingParams
from keepsight.structured_outputs import StructuredOutputsParams

MAX_CACHE_KEY_LENGTH = 1024
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
# Values of a mapping. They are checked by hand, to name the key of a faulty one, which msgspec does not do.
_Number = Annotated[Any, msgspec.Meta(extra_json_schema={"type": "number"})]
_Text = Annotated[Any, msgspec.Meta(extra_json_schema={"type": "string"})]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk
    include_obfuscation: bool | None = None


class OwnOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`keepsight`: options that no other server has."""

    # Report in the answer which cache had each picture, and when each stage ran.
    account: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a generation request; null means the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, _Number] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # Only requests with the same salt share caches. A smaller priority goes first.
    cache_salt: str | None = None
    priority: int | None = None

    # With several engines, requests with the same key prefer the same engine.
    prompt_cache_key: str | None = None

    keepsight: OwnOptions | None = None

    # Labels: by definition they never change an answer.
    metadata: dict[str, _Text] | None = None
    safety_identifier: str | None = None
    user: str | None = None

    add_special_tokens: Refused = None
    best_of: Refused = None
    cache_prompt: Refused = None
    guided_decoding_backend: Refused = None
    kv_transfer_params: Refused = None
    length_penalty: Refused = None
    logits_processors: Refused = None
    logprob_token_ids: Refused = None
    moderation: Refused = None
    prompt_cache_breakpoint: Refused = None
    prompt_cache_options: Refused = None
    prompt_cache_retention: Refused = None
    repetition_detection: Refused = None
    request_id: Refused = None
    session_id: Refused = None
    spaces_between_special_tokens: Refused = None
    stream_interval: Refused = None
    thinking_token_budget: Refused = None
    truncate_prompt_tokens: Refused = None
    truncation_side: Refused = None
    use_beam_search: Refused = None
    vllm_xargs: Refused = None
    watermarking: Refused = None

    # Accepted values of refused fields, besides null.
    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        "best_of": (1,),
        "cache_prompt": (True,),  # llama.cpp's: prompts are always cached
        "guided_decoding_backend": ("auto", "guidance"),  # vLLM's name for llguidance, which every form uses here
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "spaces_between_special_tokens": (True,),
        "stream_interval": (1,),
        "use_beam_search": (False,),
        "watermarking": (False,),
    }
    # None: as many as the context holds.
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None

    @property
    def wants_account(self) -> bool:
        return self.keepsight is not None and bool(self.keepsight.account)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_continuously(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def without_labels(self) -> Self:
        """Return the request without its labels: each may be as long as a body, and the answer uses none."""
        return msgspec.structs.replace(self, metadata=None, safety_identifier=None, user=None)

    def check(self) -> None:
        """Check what the types of the fields do not express."""
        check_refused(self)
        if self.structured_outputs is not None:
            check_refused(self.structured_outputs, "structured_outputs")
        for key, value in (self.metadata or {}).items():
            if not isinstance(value, str):
                raise InvalidArgumentError(f"metadata[{key!r:.80}]", f"must be a string, not {value!r:.80}")
        check_cache_key(self.prompt_cache_key)
        if self.stream and self.choose_prompt_logprobs() is not None:
            raise InvalidArgumentError("stream", "must not be true if log-probabilities of the prompt are requested")
        options = self.stream_options
        if options is None:
            return
        if not self.stream:
            raise InvalidArgumentError("stream_options", "needs stream to be true")
        if options.include_obfuscation:
            raise UnsupportedFieldError("stream_options.include_obfuscation", "is not supported by this server")
        if options.continuous_usage_stats and not options.include_usage:
            raise InvalidArgumentError("stream_options.continuous_usage_stats", "needs include_usage to be true")

    def to_sampling_params(
        self, defaults: Mapping[str, Any] = NO_DEFAULTS, calls: CallTerms | None = None
    ) -> SamplingParams:
        """`defaults`: values of fields that are not given; `calls`: the request's own terms, if they have been read."""
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        given["structured_outputs"] = self.read_form(calls)
        if (max_tokens := self.choose_max_tokens()) is not None:
            given["max_tokens"] = max_tokens
        given |= {"logprobs": self.choose_logprobs(), "prompt_logprobs": self.choose_prompt_logprobs()}
        with renaming_fields(self.client_field_name):
            return SamplingParams(**{"max_tokens": self.DEFAULT_MAX_TOKENS, **defaults, **given})

    def read_form(self, calls: CallTerms | None = None) -> StructuredOutputsParams | None:
        """Return the form that the answer must have, if any."""
        return read_structured_outputs(self._forms, self.structured_outputs)

    @property
    def wants_form(self) -> bool:
        return bool(self._forms)

    def client_field_name(self, field: str) -> str:
        """Return the client's name for a field: later stages report faults by our own names."""
        forms = self._forms
        return forms[0][0] if forms and field.startswith("structured_outputs.") else field

    @property
    def _forms(self) -> list[RequestedForm]:
        guided = {name: getattr(self, name) for name in _GUIDED_FIELDS}
        return list_forms(self.response_format, self.structured_outputs, guided)

    def choose_max_tokens(self) -> int | None:
        return self.max_tokens

    def choose_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens get log-probabilities; None: not even the sampled one does."""
        raise NotImplementedError

    def choose_prompt_logprobs(self) -> int | None:
        """Return the same for the prompt's tokens: the most that any part of the answer reports."""
        # A negative number goes before all others, so that SamplingParams sees and refuses it.
        return max(self.prompt_top_logprobs, default=None, key=lambda num_top: (num_top < 0, num_top))

    @property
    def prompt_top_logprobs(self) -> list[int]:
        """The numbers of likeliest tokens that the parts of the answer report for the prompt."""
        return [] if self.prompt_logprobs is None else [self.prompt_logprobs]

    @property
    def shows_thoughts(self) -> bool:
        """True if thoughts are sent, where they are separated from the text."""
        return True

    @property
    def wants_answer(self) -> bool:
        """False if only the prompt is to be reported."""
        return True


def check_cache_key(key: str | None) -> None:
    if key is not None and len(key) > MAX_CACHE_KEY_LENGTH:
        raise InvalidArgumentError("prompt_cache_key", f"must have at most {MAX_CACHE_KEY_LENGTH} characters")


_NAMES = GenerationFields.__struct_fields__
# Fields that SamplingParams has, too. Those that several request fields determine are read separately.
_SAMPLING_FIELDS = tuple(each.name for each in dataclasses.fields(SamplingParams) if each.name in _NAMES)
_GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
