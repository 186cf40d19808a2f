"""The bodies of `/tokenize` and `/detokenize`, in vLLM's shapes, and of their answers."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.chat_request import MediaProcessorOptions
from keepsight.frontend.api.tool_fields import Tool, check_tools
from keepsight.frontend.http.decode_body import BodyDecoder, Buffer, Refused, check_refused
from keepsight.frontend.prompt.lift_data_urls import decode_lifting
from keepsight.frontend.prompt.read_messages import choose_end, read_messages


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a prompt as completions take it, or of messages as a chat has them, pictures included."""

    model: str | None = None
    prompt: str | None = None
    # A `Conversation` once it is parsed.
    messages: Any = None
    return_token_strs: bool | None = None
    # Of a prompt: whether it begins as prompts do.  A chat template writes its own.
    add_special_tokens: bool | None = None
    mm_processor_kwargs: MediaProcessorOptions | None = None
    tools: list[Tool] | None = None
    cache_salt: str | None = None

    # Of messages.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Refused = None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(each) for each in self.tools or ()]

    def check(self) -> None:
        check_refused(self, {})
        check_tools(self.tools or ())
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgumentError("prompt", "exactly one of prompt and messages must be given")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidArgumentError("add_special_tokens", "must be false with messages: their template writes them")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise InvalidArgumentError(name, "is of messages, and a prompt has none")


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    # The vocabulary's own spelling.
    token_strs: list[str | None] | UnsetType = UNSET
    # Of `tokens`: those that stand for pictures.
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


_tokenize = BodyDecoder(TokenizeRequest, {"mm_processor_kwargs": MediaProcessorOptions})
_detokenize = BodyDecoder(DetokenizeRequest)


def parse_tokenize_request(body: Buffer) -> TokenizeRequest:
    request = decode_lifting(_tokenize, body)
    request.check()
    if request.messages is None:
        return request
    end = choose_end(request.add_generation_prompt, request.continue_final_message)
    conversation = read_messages(request.messages, end, request.chat_template_kwargs)
    return msgspec.structs.replace(request, messages=conversation)


def parse_detokenize_request(body: Buffer) -> DetokenizeRequest:
    return _detokenize.decode(body)
