"""The demo's tokenizer with a post-processor that adds other tokens to a text than `<bos>`."""

from pathlib import Path

import tokenizers

_TOKENS = ("<bos>", "<eos>", "<end_of_turn>")


def make_tokenizer_add(directory: Path, template: str) -> None:
    """`template`: what a text, `$A`, is turned into."""
    path = str(directory / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[(token, backend.token_to_id(token)) for token in _TOKENS]
    )
    backend.save(path)
