"""The request and answer bodies of `/tokenize` and `/detokenize`, in vLLM's shapes."""

import msgspec
from msgspec import UNSET, UnsetType

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.prompt_fields import PromptFields
from keepsight.frontend.http.decode_body import BodyDecoder, Buffer
from keepsight.frontend.prompt.lift_data_urls import decode_lifting


class TokenizeRequest(PromptFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Same as in completion requests.
    prompt: str | None = None
    # For `prompt`: false leaves out the token that prompts begin with. A chat template writes its own.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        self.check_one_of("prompt")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidArgumentError(
                "add_special_tokens", "must be false with messages: the chat template writes them"
            )


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    # As spelled in the vocabulary.
    token_strs: list[str | None] | UnsetType = UNSET
    # How many of `tokens` stand for pictures, and for sounds.
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


_tokenize = BodyDecoder(TokenizeRequest)
_detokenize = BodyDecoder(DetokenizeRequest)


def parse_tokenize_request(body: Buffer) -> TokenizeRequest:
    request = decode_lifting(_tokenize, body)
    request.check()
    return request.with_read_messages()


def parse_detokenize_request(body: Buffer) -> DetokenizeRequest:
    return _detokenize.decode(body)
