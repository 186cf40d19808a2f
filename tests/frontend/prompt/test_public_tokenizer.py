from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.public_tokenizer import PublicTokenizer
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from keepsight.frontend.prompt.tokenizer import Tokenizer
from tests.frontend.gemma_like import DEMO, gemma_like_checkpoint, load_processor

TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model"},
]


@pytest.mark.parametrize("directory", [DEMO, gemma_like_checkpoint()], ids=["demo", "gemma-like"])
def test_texts_and_ids_are_those_of_transformers(directory: Path) -> None:
    inner = Tokenizer.from_checkpoint(directory)
    ours = PublicTokenizer(inner, ChatTemplate.from_checkpoint(directory, inner.special_tokens))
    judge = load_processor(directory).tokenizer
    assert (ours.bos_token_id, ours.eos_token_id, len(ours)) == (judge.bos_token_id, judge.eos_token_id, len(judge))
    for text in ("Hello<eos>", "<bos>a"):
        for adds in (True, False):
            token_ids = ours.encode(text, add_special_tokens=adds)
            assert token_ids == judge.encode(text, add_special_tokens=adds)
            assert ours.decode(token_ids) == judge.decode(token_ids)
            assert ours.decode(token_ids, skip_special_tokens=True) == judge.decode(token_ids, skip_special_tokens=True)
    ends: list[dict[str, Any]] = [{}, {"add_generation_prompt": True}, {"continue_final_message": True}]
    for messages, end in zip((TURNS[:2], TURNS[:2], TURNS), ends, strict=True):
        judged = judge.apply_chat_template(messages, tokenize=False, **end)
        assert ours.apply_chat_template(messages, tokenize=False, **end) == judged
        assert ours.apply_chat_template(messages, **end) == judge.encode(judged, add_special_tokens=False)
    with pytest.raises(InvalidArgumentError, match="together with add_generation_prompt"):
        ours.apply_chat_template(TURNS, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize("value", [None, ["a", "b"], b"a"])
def test_a_value_other_than_text_is_refused(value: Any) -> None:
    inner = Tokenizer.from_checkpoint(DEMO)
    ours = PublicTokenizer(inner, ChatTemplate.from_checkpoint(DEMO, inner.special_tokens))
    with pytest.raises(InvalidArgumentError, match=f"text: must be a string, not {type(value).__name__}"):
        ours.encode(value)
