"""The object that `LLM.get_tokenizer()` returns: tokenizer and chat template with the method names of transformers.

Its texts and ids are those of transformers' own tokenizer, but tools are also written where the template omits them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.read_messages import choose_end, read_messages
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from keepsight.frontend.prompt.tokenizer import Tokenizer


class PublicTokenizer:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", ""))

    def __len__(self) -> int:
        return self._tokenizer.num_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise InvalidArgumentError("text", f"must be a string, not {type(text).__name__}")
        return list(self._tokenizer.encode(text, add_special_tokens, "text", add_eos=add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
    ) -> Any:
        """Return the ids or the text, with one marker for each picture, as `LLM.generate` takes it."""
        messages = read_messages(conversation, choose_end(add_generation_prompt, continue_final_message))
        text = self._template.render(messages, tools=tools or ())
        return self.encode(text, add_special_tokens=False) if tokenize else text
