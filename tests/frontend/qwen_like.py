"""A checkpoint, without weights, that shows pictures at sizes that depend on their own, like Qwen3-VL.

Its configuration is the one that Qwen publishes, and its template writes for a picture what Qwen's does. Its tokenizer
is a different one, with Qwen's special tokens.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tests.frontend.gemma_like import DEMO
from tests.qwen_template import QWEN_LIKE, THINKING_QWEN_LIKE

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VISION = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}


def build_qwen_like_checkpoint(directory: Path, vision: Mapping[str, Any] = VISION, **processor: Any) -> dict[str, int]:
    """Write the checkpoint; return the ids of its special tokens. `processor`: further image processor fields."""
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(DEMO / name, directory)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = None
    ids = {token["content"]: token["id"] for token in json.loads(tokenizer.to_str())["added_tokens"]}
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    text = config["text_config"] | {"max_position_embeddings": 40_960, "vocab_size": 1000}
    contents = {
        "config.json": {
            "text_config": text,
            "vision_config": {**vision},
            "image_token_id": ids[IMAGE],
            "video_token_id": ids[VIDEO],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"},
        "preprocessor_config.json": PROCESSOR | processor,
    }
    for name, values in contents.items():
        (directory / name).write_text(json.dumps(values))
    (directory / "chat_template.jinja").write_text(QWEN_LIKE)
    return ids


def build_thinking_checkpoint(directory: Path, template: str = THINKING_QWEN_LIKE) -> None:
    """Write the same checkpoint with tokens for a thought's tags, which are not special tokens."""
    build_qwen_like_checkpoint(directory)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
