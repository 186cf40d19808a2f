"""What the model can take, as far as requests are refused by it: read from config.json, without loading the model."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keepsight.errors import InvalidArgumentError
from keepsight.json_fields import JsonFields

logger = logging.getLogger(__name__)
DEFAULT_HIDDEN_SIZE = 2304


class _Defaults(NamedTuple):
    """transformers' own, for checkpoints that name no numbers."""

    max_positions: int
    vocab_size: int
    hidden_size: int


_DEFAULTS_OF_GEMMA3 = _Defaults(131_072, 262_208, DEFAULT_HIDDEN_SIZE)
_DEFAULTS = {
    "Qwen2_5_VLForConditionalGeneration": _Defaults(32_768, 152_064, 8192),
    "Qwen2AudioForConditionalGeneration": _Defaults(32_768, 151_936, 4096),
    "Qwen3VLForConditionalGeneration": _Defaults(128_000, 151_936, 4096),
    "Qwen3VLMoeForConditionalGeneration": _Defaults(128_000, 151_936, 2048),
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    # Prompt and answer together.
    max_model_len: int
    # Rows of the embedding.  A tokenizer may have more tokens, as a text-only Gemma's still has that of a picture, or
    # fewer: what has no text can be said all the same, and sent back.
    vocab_size: int
    # Of one token's embedding.
    hidden_size: int = DEFAULT_HIDDEN_SIZE

    @classmethod
    def from_checkpoint(cls, directory: Path, max_model_len: int | None) -> "ModelLimits":
        """`max_model_len` is what the user asked for."""
        fields = JsonFields.read(directory / "config.json")
        text = fields.section("text_config") if "text_config" in fields else fields
        defaults = next(filter(None, map(_DEFAULTS.get, fields.strings("architectures"))), _DEFAULTS_OF_GEMMA3)
        longest = text.integer("max_position_embeddings", defaults.max_positions)
        if max_model_len is not None and max_model_len > longest:
            raise InvalidArgumentError(
                "max_model_len", f"{max_model_len} exceeds the {longest} positions of the checkpoint"
            )
        reason = "the checkpoint's positions" if max_model_len is None else f"as asked, of {longest} positions"
        logger.info("max_model_len is %d: %s", max_model_len or longest, reason)
        vocab_size = text.integer("vocab_size", defaults.vocab_size)
        return cls(max_model_len or longest, vocab_size, text.integer("hidden_size", defaults.hidden_size))
