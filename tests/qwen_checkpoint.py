"""A whole checkpoint in Qwen3-VL's shape: small and random, with a byte-level tokenizer and a template like Qwen's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepsight.requests import Pixels
from tests.byte_level_tokenizer import write_byte_level_tokenizer
from tests.frontend.qwen_like import PROCESSOR
from tests.models.qwen3_vl import reference as ref
from tests.qwen_template import QWEN_LIKE

PATCH_SIZE = 16
MIN_PIXELS, MAX_PIXELS = 4 * 32 * 32, 24 * 32 * 32


def make_qwen_checkpoint(directory: Path, seed: int = 1, **processor: Any) -> Any:
    """Writes it, and returns transformers' model of it."""
    directory.mkdir(exist_ok=True)
    ids = write_byte_level_tokenizer(directory)
    arguments = ref.draw_config(seed)
    arguments["text_config"] |= {"vocab_size": max(ids.values()) + 20, "max_position_embeddings": 4096}
    arguments["vision_config"] |= {"patch_size": PATCH_SIZE}
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    reference = ref.make_reference(arguments, seed, tokens)
    reference.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    ref.save_checkpoint(reference, directory)
    sizes = {"size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}}
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | sizes | processor))
    (directory / "chat_template.jinja").write_text(QWEN_LIKE)
    return reference


def reference_answer(
    reference: Any, directory: Path, prompt_ids: list[int], pictures: list[Pixels], num_tokens: int
) -> list[int]:
    """Greedy, of pictures as they came, by transformers' own processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    inputs: dict[str, Any] = {"input_ids": torch.tensor([prompt_ids])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if pictures:
        process: Any = Qwen2VLImageProcessorPil.from_pretrained(directory)
        processed = process(images=[np.ascontiguousarray(each) for each in pictures], return_tensors="pt")
        is_picture = inputs["input_ids"] == reference.config.image_token_id
        inputs |= {**processed, "mm_token_type_ids": is_picture.int()}
    output = reference.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    answer: list[int] = output[0, len(prompt_ids) :].tolist()
    return answer
