"""Makes a checkpoint with random weights for every benchmark that needs a FOLDER.

    PYTHONPATH=. python benchmarks/make_checkpoint.py tiny-gemma3 FOLDER [--dtype bfloat16]

In the shape of Gemma 3 or of one of Qwen's models (`make_qwen_checkpoint.py`, `make_sound_checkpoint.py`).  Pictures
have 4096 patches and 256 tokens, as published; there are fewer and narrower layers, small enough for a CPU, except in
`gemma3-4b`, whose weights are best drawn with `--device cuda`.  It has the demo's chat template, and a tokenizer of
8192 tokens trained on Python's own help.  Its answers are nonsense, but take as long as meaningful ones would; any
server that loads a folder of Gemma 3 loads it.  Needs transformers.
"""

import argparse
import json
import pydoc_data.topics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from benchmarks.make_qwen_checkpoint import QWEN_SIZES, make_qwen_checkpoint
from benchmarks.make_sound_checkpoint import SOUND_SIZES, make_sound_checkpoint
from tests.models.gemma3.reference import randomize, save_checkpoint
from tests.random_checkpoint import copy_all_but_the_model

VOCAB_SIZE, MAX_LENGTH, TOKENS_PER_PICTURE, PICTURE_SIZE = 8192, 32_768, 256, 896
Size = Mapping[str, Mapping[str, int]]
SMALLEST_TOWER = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3}
SIZES: Mapping[str, Size] = {
    "tiny-gemma3": {
        "text": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 64},
        "vision": SMALLEST_TOWER,
    },
    # The shape and vocabulary size of the smallest published text model; most embedding rows have no token.
    "wide-gemma3": {
        "text": {
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "head_dim": 256,
            "vocab_size": 262_144,
        },
        "vision": SMALLEST_TOWER,
    },
    "small-gemma3": {
        "text": {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 256},
        "vision": {"hidden_size": 576, "intermediate_size": 2152, "num_hidden_layers": 12, "num_attention_heads": 8},
    },
    # As published, except for the context length and the names of the tokens.
    "gemma3-4b": {
        "text": {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_144,
            "sliding_window": 1024,
        },
        "vision": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    },
}
# At the same ids as the demo's, so that its configuration applies.
FIRST = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
PICTURE_MARKS = ["<start_of_image>", "<end_of_image>"]
PICTURE_TOKEN = "<image_soft_token>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=[*SIZES, *QWEN_SIZES, *SOUND_SIZES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="that draws the numbers, of Gemma's shape")
    args = parser.parse_args()
    if args.device != "cpu" and args.size not in SIZES:
        parser.error(f"--device is for Gemma's shape: what is drawn for {args.size} is drawn on the CPU")
    dtype = getattr(torch, args.dtype)
    if args.size in QWEN_SIZES:
        num_parameters = make_qwen_checkpoint(args.folder, QWEN_SIZES[args.size], dtype, args.seed)
    elif args.size in SOUND_SIZES:
        num_parameters = make_sound_checkpoint(args.folder, SOUND_SIZES[args.size], dtype, args.seed)
    else:
        num_parameters = make_checkpoint(args.folder, SIZES[args.size], dtype, args.seed, args.device)
    print(f"{args.folder}: {num_parameters / 1e6:.1f} M parameters")


def make_checkpoint(folder: Path, size: Size, dtype: torch.dtype, seed: int, device: str = "cpu") -> int:
    """Write the checkpoint.  Return the number of its parameters."""
    copy_all_but_the_model(folder)
    (folder / "README.md").unlink()
    write_tokenizer(folder)
    write_sizes(folder)
    with torch.device(device):
        model = make_model(size, seed)
    save_checkpoint(model.to(dtype), folder)
    name_tower_as_published(folder / "model.safetensors")
    return sum(each.numel() for each in model.parameters())


def make_model(size: Size, seed: int) -> Any:
    text = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LENGTH, "sliding_window": 512}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 1, **size["text"]}
    text["query_pre_attn_scalar"] = text["head_dim"]
    vision = {"image_size": PICTURE_SIZE, "patch_size": 14, "vision_use_head": False, **size["vision"]}
    first_mark = len(FIRST)
    tokens: dict[str, Any] = {
        "mm_tokens_per_image": TOKENS_PER_PICTURE,
        "boi_token_index": first_mark,
        "eoi_token_index": first_mark + 1,
        "image_token_index": VOCAB_SIZE - 1,
        "eos_token_id": [FIRST.index("<eos>"), FIRST.index("<end_of_turn>")],
    }
    config: Any = Gemma3Config(text_config=text, vision_config=vision, **tokens)
    model: Any = Gemma3ForConditionalGeneration(config)
    randomize(model, seed)
    return model


def write_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split("▁", "merged_with_next")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    of_bytes, newlines = [f"<0x{byte:02X}>" for byte in range(256)], ["\n" * count for count in range(1, 8)]
    first = [*FIRST, *PICTURE_MARKS, *newlines, *of_bytes]
    learning = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 1, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(pydoc_data.topics.topics.values(), learning)
    tokenizer.add_special_tokens([f"<unused{i}>" for i in range(VOCAB_SIZE - 1 - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens([PICTURE_TOKEN])
    written = json.loads(tokenizer.to_str())
    written["added_tokens"] = [
        token | {"special": token["content"] not in newlines}
        for token in written["added_tokens"]
        if token["content"] not in of_bytes
    ]
    (folder / "tokenizer.json").write_text(json.dumps(written))
    by_id = {str(token.pop("id")): token for token in written["added_tokens"]}
    _edit(folder / "tokenizer_config.json", {"model_max_length": MAX_LENGTH, "added_tokens_decoder": by_id})


def write_sizes(folder: Path) -> None:
    of_pictures = {"image_seq_length": TOKENS_PER_PICTURE}
    size = {"size": {"height": PICTURE_SIZE, "width": PICTURE_SIZE}}
    _edit(folder / "preprocessor_config.json", of_pictures | size)
    _edit(folder / "processor_config.json", of_pictures)


def name_tower_as_published(path: Path) -> None:
    """Rename the tower's weights to their published names, as some servers know no others."""
    tower = "vision_tower."
    named = {name.replace(tower, f"{tower}vision_model."): tensor for name, tensor in load_file(path).items()}
    save_file(named, path, metadata={"format": "pt"})


def _edit(path: Path, changed: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


if __name__ == "__main__":
    main()
