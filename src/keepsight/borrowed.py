"""Borrowed checkpoints: architectures without a model of our own, run by transformers' modules and processors.

Reads only a checkpoint's files. Imports neither torch nor transformers; of the latter it only looks up the version.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from keepsight.errors import CheckpointConfigError, CheckpointError
from keepsight.json_fields import JsonFields, get_optional_int, read_json_object, read_optional_json_object

TRANSFORMERS_MISSING = (
    "not one of Keepsight's own models, and transformers is not installed: pip install 'keepsight[transformers]'"
)
# Architectures that the package implements itself; `models/registry.py` holds them.
OWN_ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "Gemma3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# The files that determine how a picture is prepared, and its tokens.
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    # In older checkpoints.
    "special_tokens_map.json",
    "added_tokens.json",
)
# Limit of tokens per picture. Only the processor knows the real maximum, but an engine must have room for the largest
# picture. 40 tiles, more than models take, are 10,240 tokens.
MAX_TOKENS_OF_BORROWED = 16_384
# Most tokens that a processor writes for a picture besides those of its embeddings, if it limits these.
MAX_TOKENS_AROUND = 16


def is_borrowed(directory: Path, model_impl: str) -> bool:
    """Return whether transformers runs the checkpoint. `model_impl` is vLLM's; "auto": ours where there is one."""
    if model_impl != "auto":
        return model_impl == "transformers"
    architectures = JsonFields.read(directory / "config.json").strings("architectures")
    # A checkpoint that names no architecture counts as not borrowed; loading it reports the error.
    return bool(architectures) and not any(name in OWN_ARCHITECTURES for name in architectures)


def name_library(directory: Path, model_impl: str) -> str:
    """Return the library, with its version, whose modules run the checkpoint; "" if it is ours."""
    return f"transformers {_find_version(directory)}" if is_borrowed(directory, model_impl) else ""


@dataclass(frozen=True, slots=True)
class BorrowedProcessor:
    """The processor in a checkpoint's folder, which prepares its pictures; it has no options."""

    directory: str
    # Digest of its files and of the transformers version that reads them.
    digest: str
    # The token that stands for each of a picture's embeddings.
    image_token_id: int
    # The text that stands for a picture before expansion; None: the same token.
    marker: str | None = None
    # The most tokens of a picture.
    max_tokens: int = MAX_TOKENS_OF_BORROWED

    @classmethod
    def from_checkpoint(cls, directory: Path) -> Self:
        digest = hashlib.sha256(f"transformers {_find_version(directory)}".encode())
        for path in (directory / name for name in PROCESSOR_FILES):
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{path.name} {len(content)} ".encode() + content)
        token_id = read_image_token_id(directory / "config.json")
        return cls(
            str(directory.absolute()), digest.hexdigest(), token_id, read_marker(directory), read_max_tokens(directory)
        )


def read_image_token_id(path: Path) -> int:
    token_id = get_optional_int(path, read_json_object(path), "image_token_id", "image_token_index")
    if token_id is None:
        raise CheckpointConfigError(
            path, "image_token_id: is missing, so the token that stands for a picture is unknown"
        )
    return token_id


def read_marker(directory: Path) -> str | None:
    """Return what a chat template writes for a picture, if the processor's file says: `<image>` for Aya and Ovis."""
    processor_fields = read_optional_json_object(directory / "processor_config.json")
    named = (processor_fields.get(name) for name in ("image_placeholder_token", "image_token"))
    return next((each for each in named if isinstance(each, str) and each), None)


def read_max_tokens(directory: Path) -> int:
    """Return the most tokens of a picture: our limit, or what follows from its processor's (Gemma 4's has one)."""
    processor_fields = read_optional_json_object(directory / "processor_config.json").get("image_processor")
    of_pictures = (
        processor_fields
        if isinstance(processor_fields, dict)
        else read_optional_json_object(directory / "preprocessor_config.json")
    )
    most = of_pictures.get("max_soft_tokens")
    if isinstance(most, int) and 0 < most < MAX_TOKENS_OF_BORROWED - MAX_TOKENS_AROUND:
        return most + MAX_TOKENS_AROUND
    return MAX_TOKENS_OF_BORROWED


def count_columns(arrays: Mapping[str, Any], num_tokens: int) -> int:
    """Return the number of token columns of a picture if its processor reports a grid of patches and each token is a
    square of patches; otherwise 0.
    """
    grid = arrays.get("image_grid_thw")
    if grid is None or grid.shape != (1, 3):
        return 0
    moments, rows, columns = map(int, grid[0])
    side = math.isqrt(rows * columns // num_tokens)
    return columns // side if moments == 1 and rows * columns == num_tokens * side**2 else 0


def _find_version(directory: Path) -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        raise CheckpointError(directory, TRANSFORMERS_MISSING) from None
