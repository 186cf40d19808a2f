"""A small tokenizer in the shape of Llama's: pieces of texts, bytes for all else, and a space before every text."""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, processors, trainers

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_CORPUS = ["USER: What do you see in this picture? ASSISTANT: A quick brown fox jumps over the lazy dog."] * 3


def write_llama_like_tokenizer(directory: Path, special: Sequence[str] = ()) -> dict[str, int]:
    """`tokenizer.json` and `tokenizer_config.json`.  Returns the ids of the added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    known = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*known, *BYTES], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    # Bytes are no added tokens in a published file: a text that spells one does not become it.
    said = json.loads(tokenizer.to_str())
    said["added_tokens"] = [each for each in said["added_tokens"] if each["content"] not in BYTES]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(said))
    tokenizer.add_special_tokens([*special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}


def llama_like_checkpoint() -> Path:
    """Its tokenizer alone, and what ends an answer."""
    return Path(_built_checkpoint().name)


@functools.cache
def _built_checkpoint() -> "tempfile.TemporaryDirectory[str]":
    """As long as this process lives."""
    directory = tempfile.TemporaryDirectory(prefix="llama-like-")
    write_llama_like_tokenizer(Path(directory.name))
    (Path(directory.name) / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return directory
