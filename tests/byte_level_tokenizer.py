"""A small tokenizer like Qwen's: byte-level BPE on NFC-normalized text.

Some of its added tokens are special, and some are not.
"""

import functools
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
SPECIAL += ["<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# The first is spelled with characters of the byte alphabet, so it decodes as two bytes, which are invalid UTF-8.
ODD = ["ßß", "日 本"]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. What do you see in this picture? Describe the image.",
    'system\nYou are a helpful assistant.\nuser\nassistant\n\n{"name": "blue", "size": 12}, the colors of a square',
    "Größe, naïve café, 東京タワー, привет мир, 😀😁",
] * 3


def write_byte_level_tokenizer(
    directory: Path,
    odd: Sequence[str] = (),
    corpus: Iterable[str] = _CORPUS,
    vocab_size: int = 480,
    special: Sequence[str] = (),
) -> dict[str, int]:
    """Write `tokenizer.json` and `tokenizer_config.json`. Return the ids of the added tokens; `odd` come last.

    `special` tokens are added to those that all Qwen tokenizers have.
    """
    tokenizer = _train(corpus, vocab_size)
    tokenizer.add_special_tokens([*SPECIAL, *special])
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in (*PLAIN, *odd)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(_configure(tokenizer, special)), encoding="utf-8")
    return {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}


def byte_level_checkpoint() -> Path:
    """Return a folder with only the tokenizer (odd tokens included) and the end-of-answer tokens."""
    return Path(_built_checkpoint().name)


@functools.cache
def _built_checkpoint() -> "tempfile.TemporaryDirectory[str]":
    """The folder exists until this process ends."""
    directory = tempfile.TemporaryDirectory(prefix="byte-level-")
    ids = write_byte_level_tokenizer(Path(directory.name), ODD)
    ends = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    (Path(directory.name) / "generation_config.json").write_text(json.dumps(ends))
    return directory


def _train(corpus: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    to_words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([to_words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _configure(tokenizer: tokenizers.Tokenizer, special: Sequence[str]) -> dict[str, object]:
    described = {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": described,
        "additional_special_tokens": [*SPECIAL[1:], *special],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
