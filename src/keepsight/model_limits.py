"""Limits of the model by which requests are validated, read from config.json without loading the model."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keepsight.errors import InvalidArgumentError
from keepsight.json_fields import JsonFields

logger = logging.getLogger(__name__)
# The families' names for this field, the usual one first.
NAMES_OF_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
# OPT's embeddings are narrower than its layers: an embedded prompt as wide as the layers would fail a whole step.
NAMES_OF_HIDDEN_SIZE = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")
# Rotary embeddings whose tables depend on the longest prompt of a batch; both names mean the same.
LONG_ROPES = ("longrope", "su")
TRAINED_LENGTH = "original_max_position_embeddings"


class _Defaults(NamedTuple):
    """transformers' defaults, for checkpoints that omit a value. None: such a checkpoint is refused."""

    max_positions: int | None
    vocab_size: int | None
    # 0: unknown.
    hidden_size: int


_DEFAULTS_OF_GEMMA3 = _Defaults(131_072, 262_208, 2304)
# Only transformers knows a borrowed model's defaults.
_NONE = _Defaults(None, None, 0)
_DEFAULTS = {
    "Gemma3ForConditionalGeneration": _DEFAULTS_OF_GEMMA3,
    "Gemma3ForCausalLM": _DEFAULTS_OF_GEMMA3,
    "Qwen2_5_VLForConditionalGeneration": _Defaults(32_768, 152_064, 8192),
    "Qwen2AudioForConditionalGeneration": _Defaults(32_768, 151_936, 4096),
    "Qwen3VLForConditionalGeneration": _Defaults(128_000, 151_936, 4096),
    "Qwen3VLMoeForConditionalGeneration": _Defaults(128_000, 151_936, 2048),
    "Qwen3_5ForConditionalGeneration": _Defaults(32_768, 248_320, 4096),
    "Qwen3_5MoeForConditionalGeneration": _Defaults(32_768, 248_320, 2048),
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    # Prompt and answer together.
    max_model_len: int
    # Rows of the embedding table. The tokenizer may have more tokens (a text-only Gemma's still has the picture token)
    # or fewer: ids without text can still be generated, and sent back in a prompt.
    vocab_size: int
    # Width of a token's embedding; 0: config.json does not say.
    hidden_size: int

    @classmethod
    def from_checkpoint(cls, directory: Path, max_model_len: int | None) -> "ModelLimits":
        """`max_model_len` is what the user asked for."""
        fields = JsonFields.read(directory / "config.json")
        text = fields.section("text_config") if "text_config" in fields else fields
        defaults = next(filter(None, map(_DEFAULTS.get, fields.strings("architectures"))), _NONE)
        longest = _read_longest(text, defaults.max_positions)
        if max_model_len is not None and max_model_len > longest:
            raise InvalidArgumentError(
                "max_model_len", f"{max_model_len} exceeds the {longest} positions of the checkpoint"
            )
        reason = (
            "the checkpoint's positions"
            if max_model_len is None
            else f"as requested (the checkpoint has {longest} positions)"
        )
        logger.info("max_model_len is %d: %s", max_model_len or longest, reason)
        vocab_size = text.integer("vocab_size", defaults.vocab_size)
        widths = [text.integer(name) for name in NAMES_OF_HIDDEN_SIZE if name in text]
        return cls(max_model_len or longest, vocab_size, next(iter(widths), defaults.hidden_size))


def _read_longest(text: JsonFields, default: int | None) -> int:
    lengths = [text.integer(name) for name in NAMES_OF_POSITIONS if name in text]
    longest = lengths[0] if lengths else text.integer(NAMES_OF_POSITIONS[0], default)
    ropes = [text.section(name) for name in ("rope_scaling", "rope_parameters")]
    # One for all layers, or one for each type of them.
    for rope in (*ropes, *(of_type for each in ropes for of_type in each.sections())):
        if rope.text("rope_type") in LONG_ROPES or rope.text("type") in LONG_ROPES:
            # Beyond this length another table would rotate all positions, so answers would depend on other requests.
            trained = rope if TRAINED_LENGTH in rope else text
            longest = min(longest, trained.integer(TRAINED_LENGTH))
    return longest
