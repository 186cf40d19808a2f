"""The body of `POST /v1/embeddings` (texts, token ids, or, as in vLLM, messages with pictures), and that of its answer.

Inside the package the result is called a *vector*, to distinguish it from the embeddings of a picture.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.api.generation_fields import OwnOptions, check_cache_key
from keepsight.frontend.api.listed_prompts import Prompt, is_prompt, name_prompts
from keepsight.frontend.api.prompt_fields import PromptFields
from keepsight.frontend.api.response_parts import Extras, Usage
from keepsight.frontend.http.decode_body import BodyDecoder, Buffer, NeutralValues, Refused
from keepsight.frontend.prompt.lift_data_urls import decode_lifting

# OpenAI's limit.
MAX_INPUTS = 2048


class EmbeddingsRequest(PromptFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: str | list[Any] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    # Return only this many of the first numbers.
    dimensions: int | None = None
    # vLLM's field: whether the vector is normalized to length 1.
    use_activation: bool | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
    keepsight: OwnOptions | None = None
    user: str | None = None
    # Without effect: a text begins as prompts do, and a chat template writes its own special tokens.
    add_special_tokens: bool | None = None

    embed_dtype: Refused = None
    endianness: Refused = None
    padding: Refused = None
    request_id: Refused = None
    truncate_prompt_tokens: Refused = None
    truncation_side: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "padding": ("do_not_pad",),
    }

    @property
    def inputs(self) -> dict[str, Prompt]:
        """The inputs, keyed by their names in the request, such as `input[1]`."""
        return name_prompts("input", self.input)

    @property
    def is_normalized(self) -> bool:
        return self.use_activation is not False

    @property
    def wants_account(self) -> bool:
        return self.keepsight is not None and bool(self.keepsight.account)

    def check(self) -> None:
        self.check_one_of("input")
        check_cache_key(self.prompt_cache_key)
        if self.input is not None and self.add_special_tokens is False:
            raise UnsupportedFieldError("add_special_tokens", "must be true or left out: texts begin as prompts do")
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidArgumentError("dimensions", f"must be at least 1, not {self.dimensions}")
        # Checked before looking at any input: there may be millions.
        if self.input is not None and not is_prompt(self.input) and not 0 < len(self.input) <= MAX_INPUTS:
            raise InvalidArgumentError("input", f"must hold 1 to {MAX_INPUTS} texts, not {len(self.input)}")
        for field, each in self.inputs.items():
            if not is_prompt(each):
                kinds = "a string, a list of token ids, or a list of either; pictures go into messages"
                raise InvalidArgumentError(field, f"must be {kinds}")


_NUMBERS_OR_BASE64 = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    # Already JSON: encoding all vectors at once would block the event loop.
    embedding: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_NUMBERS_OR_BASE64)]
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
    keepsight: Extras | UnsetType = UNSET
    object: Literal["list"] = "list"


_decoder = BodyDecoder(EmbeddingsRequest)


def parse_embeddings_request(body: Buffer) -> EmbeddingsRequest:
    request = decode_lifting(_decoder, body)
    request.check()
    # As in vLLM: by default no generation prompt follows the messages, which are embedded, not answered.
    return request.with_read_messages(begins_answer=False)
