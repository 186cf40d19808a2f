"""Makes a checkpoint in the shape of Qwen3-VL or Qwen2.5-VL: pictures keep their own sizes, text is byte-level.

A picture of 896 x 896 has 784 or 1024 tokens, respectively, of 4 patches each, as published; there are fewer and
narrower layers.  The tokenizer of 8192 tokens is trained on Python's own help.
"""

import json
import pydoc_data.topics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.byte_level_tokenizer import write_byte_level_tokenizer
from tests.frontend.qwen_like import PROCESSOR
from tests.models.qwen2_5_vl import reference as qwen2_5_vl
from tests.models.qwen3_vl import reference as qwen3_vl
from tests.qwen_checkpoint import QWEN2_5_VL
from tests.qwen_template import QWEN_LIKE

VOCAB_SIZE, MAX_LENGTH = 8192, 32_768
QwenSize = Mapping[str, Mapping[str, Any]]
QWEN_SIZES: Mapping[str, QwenSize] = {
    "tiny-qwen3-vl": {
        "text": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 64},
        "vision": {"hidden_size": 192, "intermediate_size": 768, "depth": 4, "num_heads": 3},
    },
    "small-qwen3-vl": {
        "text": {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 128},
        "vision": {"hidden_size": 576, "intermediate_size": 2152, "depth": 12, "num_heads": 9},
    },
    "tiny-qwen2.5-vl": {
        "text": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6},
        "vision": {"hidden_size": 192, "intermediate_size": 768, "depth": 4, "num_heads": 3, "window_size": 112},
    },
}
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_LENGTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}


def make_qwen_checkpoint(folder: Path, size: QwenSize, dtype: torch.dtype, seed: int) -> int:
    """Write the checkpoint.  Return the number of its parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = pydoc_data.topics.topics.values()
    ids = write_byte_level_tokenizer(folder, corpus=corpus, vocab_size=VOCAB_SIZE - 32)
    has_windows = "window_size" in size["vision"]
    arguments = _arguments_with_windows(size) if has_windows else _arguments(size)
    model = (qwen2_5_vl if has_windows else qwen3_vl).make_reference(arguments, seed, _tokens(ids))
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    qwen3_vl.save_checkpoint(model.to(dtype), folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN2_5_VL.processor if has_windows else PROCESSOR))
    if not has_windows:  # else one file applies to both, as published
        films = {**PROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(films))
    (folder / "chat_template.jinja").write_text(QWEN_LIKE)
    return sum(each.numel() for each in model.parameters())


def _arguments(size: QwenSize) -> dict[str, Any]:
    text, vision = size["text"], size["vision"]
    sixth = text["head_dim"] // 6
    rotary = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [text["head_dim"] // 2 - 2 * sixth, sixth, sixth],
        "mrope_interleaved": True,
    }
    depth = vision["depth"]
    return {
        "text_config": {
            **_COMMON,
            "rope_parameters": rotary,
            **text,
        },
        "vision_config": {
            "deepstack_visual_indexes": [depth // 4, depth // 2, 3 * depth // 4],
            "out_hidden_size": text["hidden_size"],
            **vision,
        },
        "tie_word_embeddings": True,
    }


def _arguments_with_windows(size: QwenSize) -> dict[str, Any]:
    """Return the arguments of Qwen2.5-VL; only the last layer of the tower sees whole pictures."""
    text, vision = size["text"], size["vision"]
    half = text["hidden_size"] // 4 // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    return {
        "text_config": {**_COMMON, "rope_parameters": rotary, "rms_norm_eps": 1e-6, **text},
        "vision_config": {
            "fullatt_block_indexes": [vision["depth"] - 1],
            "out_hidden_size": text["hidden_size"],
            **vision,
        },
        "tie_word_embeddings": True,
    }


def _tokens(ids: Mapping[str, int]) -> dict[str, int]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {field: ids[token] for field, token in names.items()}
