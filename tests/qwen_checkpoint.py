"""Small, complete checkpoints like Qwen's, with random weights, a byte-level tokenizer and a template."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from keepsight.requests import Pixels
from tests.byte_level_tokenizer import write_byte_level_tokenizer
from tests.frontend.qwen_like import PROCESSOR
from tests.models.qwen2_5_vl import reference as qwen2_5_vl
from tests.models.qwen3_5 import mixture_reference as qwen3_5_mixture
from tests.models.qwen3_5 import reference as qwen3_5
from tests.models.qwen3_vl import mixture_reference
from tests.models.qwen3_vl import reference as ref
from tests.qwen_template import PICTURES_ALONE, QWEN_LIKE

PATCH_SIZE = 16
FILM_PROCESSOR = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 32 * 32 * 32},
    "patch_size": PATCH_SIZE,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
MIN_PIXELS, MAX_PIXELS = 4 * 32 * 32, 24 * 32 * 32


class Shape(NamedTuple):
    reference: Any
    vision: dict[str, Any]
    processor: dict[str, Any]
    # None: the file for pictures is also used for films.
    films: dict[str, Any] | None
    template: str


QWEN3_VL = Shape(ref, {"patch_size": PATCH_SIZE}, PROCESSOR, FILM_PROCESSOR, QWEN_LIKE)
QWEN3_VL_MIXTURE = QWEN3_VL._replace(reference=mixture_reference)
QWEN3_5 = QWEN3_VL._replace(reference=qwen3_5)
QWEN3_5_MIXTURE = QWEN3_5._replace(reference=qwen3_5_mixture)
# As published, it has no means and no `size`.
QWEN2_5_VL = Shape(
    qwen2_5_vl,
    {"patch_size": 14, "window_size": 70, "fullatt_block_indexes": [1], "depth": 3},
    {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    None,
    PICTURES_ALONE,
)


def make_qwen_checkpoint(directory: Path, seed: int = 1, shape: Shape = QWEN3_VL, **processor: Any) -> Any:
    """Write the checkpoint and return its transformers model."""
    directory.mkdir(exist_ok=True)
    ids = write_byte_level_tokenizer(directory)
    arguments = shape.reference.draw_config(seed)
    arguments["text_config"] |= {"vocab_size": max(ids.values()) + 20, "max_position_embeddings": 4096}
    arguments["vision_config"] |= shape.vision
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    reference = shape.reference.make_reference(arguments, seed, tokens)
    reference.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    ref.save_checkpoint(reference, directory)
    sizes = {"size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}}
    (directory / "preprocessor_config.json").write_text(json.dumps(shape.processor | sizes | processor))
    if shape.films is not None:
        (directory / "video_preprocessor_config.json").write_text(json.dumps(shape.films))
    (directory / "chat_template.jinja").write_text(shape.template)
    return reference


def reference_answer(
    reference: Any,
    directory: Path,
    prompt_ids: list[int],
    pictures: list[Pixels],
    num_tokens: int,
    frames: Pixels | None = None,
    seconds: float | None = None,
) -> list[int]:
    """Return transformers' greedy answer, with inputs from its own processor.

    `pictures` are passed unresized. `frames` are the sampled frames of a film, and `seconds` the duration of two of
    them, for models whose prompt text does not give it.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ids = torch.tensor([prompt_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pictures or frames is not None:
        process: Any = Qwen2VLImageProcessorPil.from_pretrained(directory)
        if pictures:
            inputs |= process(images=[np.ascontiguousarray(each) for each in pictures], return_tensors="pt")
        if frames is not None:
            inputs |= _film_inputs(process, frames)
        if seconds is not None:
            inputs["second_per_grid_ts"] = torch.tensor([seconds])
        config = reference.config
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    output = reference.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    answer: list[int] = output[0, len(prompt_ids) :].tolist()
    return answer


def _film_inputs(process: Any, frames: Pixels) -> dict[str, Any]:
    """Return the inputs for frames that need no resizing; the whole processor cannot be built without torchvision."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    mean, std = (torch.tensor(each)[:, None, None] for each in (process.image_mean, process.image_std))
    pixels = (torch.from_numpy(frames).permute(0, 3, 1, 2) / 255 - mean) / std
    patchify: Any = Qwen3VLVideoProcessor.patchify
    patches, *grid = patchify(None, pixels[None], process.patch_size, ref.MERGE_SIZE, 2)
    return {"pixel_values_videos": patches[0], "video_grid_thw": torch.tensor([grid])}
