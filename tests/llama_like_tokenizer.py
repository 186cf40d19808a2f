"""A small tokenizer like Llama's: BPE with byte fallback and a space before every text."""

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
    """Write `tokenizer.json` and `tokenizer_config.json`. Return the ids of the added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    known = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*known, *BYTES], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    # In published files the byte tokens are not added tokens: a text that spells one is not encoded as it.
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = [each for each in fields["added_tokens"] if each["content"] not in BYTES]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
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
    """Return a folder with only the tokenizer and the end-of-answer tokens."""
    return Path(_built_checkpoint().name)


@functools.cache
def _built_checkpoint() -> "tempfile.TemporaryDirectory[str]":
    """The folder exists until this process ends."""
    directory = tempfile.TemporaryDirectory(prefix="llama-like-")
    write_llama_like_tokenizer(Path(directory.name))
    (Path(directory.name) / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return directory
