"""A checkpoint, without weights, that takes sounds like Qwen2-Audio.

Its configuration is the one that Qwen publishes, its template the processor's. Its tokenizer is a different one, with
Qwen's special tokens.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor

from tests.frontend.gemma_like import DEMO
from tests.sound_checkpoint import AUDIO_TOKENS, EXTRACTOR

SOUND = AUDIO_TOKENS[0]


def build_sound_like_checkpoint(directory: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *AUDIO_TOKENS])
    tokenizer.post_processor = None
    tokenizer.save(str(directory / "tokenizer.json"))
    text = json.loads((DEMO / "config.json").read_text())["text_config"]
    contents: dict[str, Any] = {
        "config.json": {
            "text_config": text | {"max_position_embeddings": 8192, "vocab_size": 1000},
            "audio_config": {"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "max_source_positions": 1500},
            "audio_token_index": tokenizer.token_to_id(SOUND),
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        },
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"},
        "preprocessor_config.json": EXTRACTOR,
    }
    for name, values in contents.items():
        (directory / name).write_text(json.dumps(values))
    template: Any = Qwen2AudioProcessor.default_chat_template
    (directory / "chat_template.jinja").write_text(template.fget(None))


def load_sound_processor(directory: Path) -> Any:
    """Return transformers' processor, the reference."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    make: Any = Qwen2AudioProcessor
    return make(WhisperFeatureExtractor.from_pretrained(directory), tokenizer)
