"""What the model can take, as far as requests are refused by it: read from config.json, without loading the model."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keepsight.errors import CheckpointConfigError, InvalidArgumentError
from keepsight.image_processor_config import ImageProcessorConfig, options_named
from keepsight.json_fields import JsonFields

logger = logging.getLogger(__name__)
DEFAULT_HIDDEN_SIZE = 2304


class _Defaults(NamedTuple):
    """transformers' own, for checkpoints that name no numbers."""

    max_positions: int
    vocab_size: int
    hidden_size: int


_DEFAULTS_OF_GEMMA3 = _Defaults(131_072, 262_208, DEFAULT_HIDDEN_SIZE)
_DEFAULTS = {"Qwen3VLForConditionalGeneration": _Defaults(128_000, 151_936, 4096)}


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


def load_image_config(directory: Path, backend: str, overrides: dict[str, object]) -> ImageProcessorConfig | None:
    """None for a model that reads text only.  Two files say how large pictures are, and they must agree."""
    fields = JsonFields.read(directory / "config.json")
    if "vision_config" not in fields:
        return None
    with options_named():
        config = ImageProcessorConfig.from_checkpoint(directory, backend=backend, **overrides)
    if config is None:
        raise CheckpointConfigError(
            directory / "preprocessor_config.json", "is missing, though config.json has a vision tower"
        )
    _check_agree(fields.section("vision_config"), config)
    return config


def _check_agree(vision: JsonFields, config: ImageProcessorConfig) -> None:
    if config.sizes is not None:
        expected = {"patch_size": config.sizes.patch_size, "spatial_merge_size": config.sizes.merge_size}
        for name, value in {**expected, "temporal_patch_size": 2}.items():
            if vision.integer(name) != value:
                raise vision.refuse(name, f"is {vision.integer(name)}, but {value} to the image processor")
    elif "spatial_merge_size" in vision:
        message = f"is for pictures of many sizes, but all are resized to {config.width} x {config.height}"
        raise vision.refuse("spatial_merge_size", message)
    elif "image_size" in vision:
        side = vision.integer("image_size")
        if (config.width, config.height) != (side, side):
            raise vision.refuse(
                "image_size", f"is {side}, but pictures are resized to {config.width} x {config.height}"
            )
