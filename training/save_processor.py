"""Write all files of a checkpoint except its weights: the tokenizer, the chat template, the processor's settings.

The tokenizer has exactly the shape of Gemma's (transformers rebuilds its normaliser and decoder by its class and takes
only vocabulary and merges from the file); its few hundred word pieces come from this project's own sentences.
"""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from conversations import ConversationMaker
from demo_model import BOS_ID
from off_script import TRAINED_PROMPTS
from packed_conversations import SOFT_TOKEN, TOKENS_PER_PICTURE
from patch_labels import SIDE

NOT_COPIED = ("model.safetensors", "config.json", "generation_config.json", "README.md")
NAMED_TOKENS = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
PICTURE_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": SOFT_TOKEN}
SPECIAL_TOKENS = (*NAMED_TOKENS.values(), "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>")
NUM_PIECES = 640
# The template ends a line and the processor adds an empty one: together they must be a single token.
NEWLINE_MERGES = [("\n", "\n"), ("\n\n", "\n\n"), ("\n\n", "\n")]
CHAT_TEMPLATE = Path(__file__).parent / "gemma3_chat_template.jinja"


def save_processor(directory: Path, *, copy_from: Path | None) -> None:
    """The files of another checkpoint, or new ones."""
    directory.mkdir(parents=True, exist_ok=True)
    if copy_from is None:
        _save_new_files(directory)
        return
    for file in copy_from.iterdir():
        if file.is_file() and file.name not in NOT_COPIED:
            shutil.copy(file, directory / file.name)


def _save_new_files(directory: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = CHAT_TEMPLATE.read_text()
    (directory / "chat_template.jinja").write_text(template)
    files = {
        "chat_template.json": {"chat_template": template},
        "tokenizer_config.json": _tokenizer_config(tokenizer),
        "special_tokens_map.json": {**NAMED_TOKENS, **PICTURE_TOKENS},
        "processor_config.json": {"image_seq_length": TOKENS_PER_PICTURE, "processor_class": "Gemma3Processor"},
        "preprocessor_config.json": _preprocessor_config(),
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")


def build_tokenizer() -> Tokenizer:
    vocabulary, merges = _learn_pieces()
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, SOFT_TOKEN])
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS_ID)]
    )
    return tokenizer


def _learn_pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    learner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    learner.normalizer = normalizers.Replace(" ", "▁")
    # Only while learning: no piece crosses a word, and every digit and mark stays alone.
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Split(Regex(r"[^\w\s▁]|[0-9]"), "isolated"),
        ]
    )
    alphabet = [*map(chr, range(33, 127)), "▁"]
    learner.train_from_iterator(
        _sentences(), trainers.BpeTrainer(vocab_size=NUM_PIECES, initial_alphabet=alphabet, show_progress=False)
    )
    learned: dict[str, Any] = json.loads(learner.to_str())["model"]
    newlines = ["\n" * length for length in (1, 2, 3, 4)]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    learned_pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *newlines, *in_bytes, *learned_pieces, SOFT_TOKEN])
    merges = [(left, right) for left, right in learned["merges"]]
    return {piece: token_id for token_id, piece in enumerate(pieces)}, [*NEWLINE_MERGES, *merges]


def _sentences() -> list[str]:
    maker = ConversationMaker(Random(7))
    makers = (maker.about_one_picture, maker.about_several_pictures, maker.without_picture)
    conversations = [make() for make in makers for _ in range(1500)]
    turns = [turn for conversation in conversations for branch in conversation.branches for turn in branch]
    texts = [text for turn in turns for text in (_user_text(turn.prompt), turn.answer)]
    words = {word.strip("?.,:!") for text in texts for word in text.split()}
    # Every word both with and without a space before it, capitalised and not.
    variants = [variant for word in sorted(words) for variant in (word, f" {word}", word.lower(), f" {word.lower()}")]
    return texts + [*TRAINED_PROMPTS] * 5 + variants * 10


def _user_text(prompt: str) -> str:
    for mark in (*SPECIAL_TOKENS, "<picture>"):
        prompt = prompt.replace(mark, " ")
    return prompt


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(tokenizer.token_to_id(token)): {"content": token, **flags} for token in (*SPECIAL_TOKENS, SOFT_TOKEN)}
    return {
        "tokenizer_class": "GemmaTokenizer",
        "processor_class": "Gemma3Processor",
        "add_bos_token": True,
        "add_eos_token": False,
        **NAMED_TOKENS,
        **PICTURE_TOKENS,
        "extra_special_tokens": PICTURE_TOKENS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "padding_side": "left",
        "added_tokens_decoder": added,
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_seq_length": TOKENS_PER_PICTURE,
        "pan_and_scan_max_num_crops": None,
        "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": SIDE, "width": SIDE},
    }
