"""A small, complete checkpoint like Qwen2-Audio's, with random weights, a byte-level tokenizer and a template."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.byte_level_tokenizer import write_byte_level_tokenizer
from tests.models.qwen2_audio import reference as ref
from tests.models.qwen3_vl.reference import save_checkpoint

# As published, except for the maximum length of a sound and the number of mel bands.
EXTRACTOR: dict[str, Any] = {
    "chunk_length": 30,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "n_fft": 400,
    "padding_side": "right",
    "padding_value": 0.0,
    "processor_class": "Qwen2AudioProcessor",
    "return_attention_mask": True,
    "sampling_rate": 16_000,
}
AUDIO_TOKENS = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]


def make_sound_checkpoint(directory: Path, seed: int = 1) -> Any:
    """Write a checkpoint whose sounds last at most a second, and return its transformers model."""
    return write_sound_checkpoint(directory, ref.draw_config(seed), seed)


def write_sound_checkpoint(
    directory: Path,
    arguments: Mapping[str, Any],
    seed: int,
    dtype: torch.dtype = torch.float32,
    train: Callable[..., dict[str, int]] = write_byte_level_tokenizer,
) -> Any:
    """Write the checkpoint; `train` writes the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = train(directory, special=AUDIO_TOKENS)
    text, audio = arguments["text_config"], arguments["audio_config"]
    text |= {"vocab_size": max(text["vocab_size"], max(ids.values()) + 20)}
    reference = ref.make_reference(arguments, seed, ids["<|AUDIO|>"])
    reference.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    save_checkpoint(reference.to(dtype), directory)
    own = {"feature_size": audio["num_mel_bins"], "chunk_length": audio["max_source_positions"] // ref.NUM_PLACES}
    (directory / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR | own))
    (directory / "chat_template.jinja").write_text(_published_template())
    return reference


def _published_template() -> str:
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    template: Any = Qwen2AudioProcessor.default_chat_template
    return str(template.fget(None))
