"""A tokenizer with the features of Gemma's that the demo's lacks, and transformers as the reference for both.

Runs of newlines, runs of spaces, and markup are added tokens that are not special; the soft token comes last; only
generation_config.json makes the end of a turn the end of an answer.
"""

import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from keepsight.demo import checkpoint_path

DEMO = checkpoint_path()

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<unused0>", "<unused1>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>"]
ADDED = ["\n" * count for count in range(1, 8)] + ["▁" * count for count in range(2, 6)] + ["<table>", "</table>"]
IMAGE_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What do you see in this picture? Describe the image.",
    "Here is the original image and here are some crops to help you see better. A red circle, a blue square.",
    "Größe, naïve café, 東京タワー, привет мир. user model system.",
] * 3


def build_gemma_like_checkpoint(directory: Path) -> None:
    """Write a copy of the demo checkpoint, without its weights and with another tokenizer."""
    ignored = shutil.ignore_patterns("*.safetensors", "special_tokens_map.json")
    shutil.copytree(DEMO, directory, ignore=ignored, dirs_exist_ok=True)
    ids = _write_tokenizer(directory / "tokenizer.json")
    _edit(directory / "tokenizer_config.json", lambda config: _name_tokens_as_gemma_does(config, ids))
    _edit(directory / "generation_config.json", lambda config: config | {"eos_token_id": [1, ids["<end_of_turn>"]]})
    indices = {f"{name}_index": ids[token] for name, token in IMAGE_TOKENS.items()}
    _edit(directory / "config.json", lambda config: config | indices)


def build_checkpoint_with_hole(directory: Path) -> range:
    """Write one with a pruned vocabulary; return its hole: ids without tokens, with some tokens after them."""
    build_gemma_like_checkpoint(directory)
    hole = range(400, 420)

    def move(token_id: int) -> int:
        return token_id + len(hole) * (token_id >= hole.start)

    def widen(tokenizer: dict[str, Any]) -> dict[str, Any]:
        added = [token | {"id": move(token["id"])} for token in tokenizer["added_tokens"]]
        moved = {text: move(token_id) for text, token_id in tokenizer["model"]["vocab"].items()}
        # An added token that is also in the vocabulary has the same id there.
        moved |= {token["content"]: token["id"] for token in added}
        return tokenizer | {"added_tokens": added, "model": tokenizer["model"] | {"vocab": moved}}

    _edit(directory / "tokenizer.json", widen)
    _edit(directory / "tokenizer_config.json", lambda config: config | {"added_tokens_decoder": {}})
    _edit(directory / "config.json", lambda config: config | {"image_token_index": move(config["image_token_index"])})
    return hole


def gemma_like_checkpoint() -> Path:
    return Path(_built_checkpoint().name)


@functools.cache
def _built_checkpoint() -> "tempfile.TemporaryDirectory[str]":
    """Return a checkpoint that lasts as long as this process."""
    directory = tempfile.TemporaryDirectory(prefix="gemma-like-")
    build_gemma_like_checkpoint(Path(directory.name))
    return directory


@functools.cache
def load_processor(directory: Path) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    auto_processor: Any = transformers.AutoProcessor
    return auto_processor.from_pretrained(directory)


def _write_tokenizer(path: Path) -> dict[str, int]:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    first = SPECIAL + ADDED + ["<start_of_image>", "<end_of_image>"] + byte_tokens
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=620, special_tokens=first, show_progress=False)
    )
    tokenizer.add_special_tokens(["<image_soft_token>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    written = json.loads(tokenizer.to_str())
    written["added_tokens"] = [
        token | {"special": token["content"] not in ADDED}
        for token in written["added_tokens"]
        if token["content"] not in byte_tokens
    ]
    path.write_text(json.dumps(written), encoding="utf-8")
    return {token["content"]: token["id"] for token in written["added_tokens"]}


def _name_tokens_as_gemma_does(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in IMAGE_TOKENS}
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    decoder = {str(ids[token]): plain | {"content": token, "special": token not in ADDED} for token in ids}
    return kept | {"extra_special_tokens": IMAGE_TOKENS, "added_tokens_decoder": decoder}


def _edit(path: Path, change: Any) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))), encoding="utf-8")
