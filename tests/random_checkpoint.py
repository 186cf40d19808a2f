"""Checkpoints with the demo's tokenizer, template and processor, and random weights: nothing about them is learnt."""

import shutil
from pathlib import Path
from typing import Any

import torch

from keepsight.demo import checkpoint_path
from tests.models.gemma3 import reference as ref


def make_checkpoint(directory: Path, seed: int, *, ties_embeddings: bool) -> Any:
    """Writes it to `directory`, and returns transformers' model of it."""
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
    """Like the published ones, it has one token fewer than its tokenizer: that of a picture, 909."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    arguments: Any = {**ref.draw_config(0)["text_config"], "vocab_size": 909}
    copy_all_but_the_model(directory)
    ref.save_checkpoint(Gemma3ForCausalLM(Gemma3TextConfig(**arguments)), directory)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (directory / name).unlink()


def copy_all_but_the_model(directory: Path) -> None:
    ignored = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(checkpoint_path(), directory, ignore=ignored, dirs_exist_ok=True)
