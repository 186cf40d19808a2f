"""The body of `POST /v1/chat/completions`. The shape of its messages is checked by `read_messages`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import msgspec

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.film_config import FILM_REQUEST_OPTIONS
from keepsight.frontend.api.generation_fields import NO_DEFAULTS, GenerationFields
from keepsight.frontend.api.tool_fields import (
    CallTerms,
    Function,
    Tool,
    ToolChoice,
    check_tools,
    guide_calls,
    read_terms,
)
from keepsight.frontend.http.decode_body import BodyDecoder, Buffer, NeutralValues, Refused
from keepsight.frontend.prompt.call_text import BARE, CallForm
from keepsight.frontend.prompt.lift_data_urls import decode_lifting
from keepsight.frontend.prompt.read_messages import choose_end, read_messages
from keepsight.frontend.prompt.reasoning_effort import Effort
from keepsight.sampling_params import SamplingParams
from keepsight.structured_outputs import StructuredOutputsParams


class MediaProcessorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `mm_processor_kwargs` that a request may set; some only if the server trusts requests with them."""

    do_pan_and_scan: bool | None = None
    # Open to every client: it could as well send a larger picture as have this one shown larger.
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: dict[str, int] | None = None
    # For films. The server's limit of frames still holds.
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None

    pan_and_scan_min_crop_size: int | None = None
    pan_and_scan_max_num_crops: int | None = None
    pan_and_scan_min_ratio_to_activate: float | None = None
    resample: int | None = None

    FREE: ClassVar[frozenset[str]] = FILM_REQUEST_OPTIONS | {"do_pan_and_scan", "min_pixels", "max_pixels", "size"}

    def as_overrides(self, *, are_trusted: bool) -> dict[str, Any]:
        overrides = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        for name in overrides:
            if name not in self.FREE and not are_trusted:
                raise UnsupportedFieldError(
                    f"mm_processor_kwargs.{name}",
                    "is accepted in requests only with --trust-request-mm-processor-kwargs",
                )
        return overrides


class PredictedPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="content"):
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A `Conversation` once parsed: read_messages() checks their shape, and names faulty places better than a decoder.
    messages: Any
    mm_processor_kwargs: MediaProcessorOptions | None = None

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None

    audio: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    echo: Refused = None
    function_call: Refused = None
    functions: Refused = None
    media_io_kwargs: Refused = None
    modalities: Refused = None
    return_prompt_text: Refused = None
    separate_reasoning: Refused = None
    service_tier: Refused = None
    store: Refused = None
    stream_reasoning: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        **GenerationFields.NEUTRAL_VALUES,
        "add_special_tokens": (False,),  # the template writes them
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "media_io_kwargs": ({},),
        "modalities": (["text"],),
        "return_prompt_text": (False,),
        # SGLang's two: thoughts are always separate, and streamed as they come.
        "separate_reasoning": (True,),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_reasoning": (True,),
        "verbosity": ("medium",),
    }

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as the chat template sees them. If none may be called, the model had better not see any."""
        shown = () if self.tool_choice == "none" else self.tools or ()
        return [msgspec.to_builtins(each) for each in shown]

    @property
    def shows_thoughts(self) -> bool:
        return self.include_reasoning is not False

    def to_sampling_params(
        self, defaults: Mapping[str, Any] = NO_DEFAULTS, calls: CallTerms | None = None
    ) -> SamplingParams:
        params = super().to_sampling_params(defaults, calls)
        return params if self.prediction is None else replace(params, prediction=self.prediction.text)

    def read_call_terms(self, form: CallForm = BARE) -> CallTerms:
        is_parallel = self.parallel_tool_calls is not False
        return read_terms(self.tools or (), self.tool_choice, form, is_parallel=is_parallel)

    def without_bulky_fields(self) -> Self:
        """Return only what the answer needs: the rest may be megabytes, and the answer may take minutes."""
        named = [Tool(tool.type, Function(tool.function.name)) for tool in self.tools or ()]
        choice = (
            self.tool_choice if isinstance(self.tool_choice, str | None) else self.tool_choice.without_bulky_fields()
        )
        # The usage in the answer depends on whether there was a prediction.
        predicted = None if self.prediction is None else Prediction("")
        return msgspec.structs.replace(
            self.without_labels(),
            messages=None,
            tools=named,
            tool_choice=choice,
            chat_template_kwargs=None,
            prediction=predicted,
        )

    def check(self) -> None:
        super().check()
        check_tools(self.tools or ())
        self.read_call_terms()  # refuses a wrong choice before any work is done

    def read_form(self, calls: CallTerms | None = None) -> StructuredOutputsParams | None:
        form, terms = super().read_form(), self.read_call_terms() if calls is None else calls
        if not terms.names:
            return form
        if self.ignore_eos:
            raise InvalidArgumentError(
                "ignore_eos", "must not be given together with tools: a complete call ends the answer"
            )
        return guide_calls(self.tools or (), terms, form, "" if form is None else super().client_field_name(form.path))

    @property
    def wants_form(self) -> bool:
        return super().wants_form or bool(self.read_call_terms().names)

    def client_field_name(self, field: str) -> str:
        if field.startswith("structured_outputs.") and self.read_call_terms().names:
            return "tools"
        newer = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}.get(field)
        return newer if newer and getattr(self, newer) is not None else super().client_field_name(field)

    def own_field_name(self, field: str) -> str:
        """Return this request's own name for a field of the chat API."""
        return field

    def choose_max_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidArgumentError("max_tokens", f"is {old}, but max_completion_tokens, its new name, is {new}")
        return old if new is None else new

    def choose_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidArgumentError("top_logprobs", f"is {self.top_logprobs}, which needs logprobs to be true")
        return None


_decoder = BodyDecoder(ChatRequest)


def parse_chat_request(body: Buffer) -> ChatRequest:
    request = decode_lifting(_decoder, body)
    request.check()
    end = choose_end(request.add_generation_prompt, request.continue_final_message)
    conversation = read_messages(request.messages, end, request.chat_template_kwargs)
    return msgspec.structs.replace(request, messages=replace(conversation, effort=request.reasoning_effort))
