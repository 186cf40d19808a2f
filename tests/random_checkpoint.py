"""Checkpoints with the demo's tokenizer, template and processor, and random (untrained) weights."""

import shutil
from pathlib import Path
from typing import Any

import torch

from keepsight.demo import checkpoint_path
from tests.models.gemma3 import reference as ref


def make_checkpoint(directory: Path, seed: int, *, ties_embeddings: bool) -> Any:
    """Write a checkpoint to `directory` and return its transformers model."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config: Any = Gemma3Config.from_pretrained(checkpoint_path())
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = ties_embeddings
    model: Any = Gemma3ForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    ref.randomize(model, seed)
    copy_all_but_the_model(directory)
    ref.save_checkpoint(model.to(torch.float32).eval(), directory)
    return model


def make_text_only_checkpoint(directory: Path) -> None:
    """Write a text-only checkpoint. Like published ones, it lacks one token of its tokenizer: the picture's, 909."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    arguments: Any = {**ref.draw_config(0)["text_config"], "vocab_size": 909}
    copy_all_but_the_model(directory)
    ref.save_checkpoint(Gemma3ForCausalLM(Gemma3TextConfig(**arguments)), directory)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (directory / name).unlink()


def copy_all_but_the_model(directory: Path) -> None:
    ignored = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(checkpoint_path(), directory, ignore=ignored, dirs_exist_ok=True)
