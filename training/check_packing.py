"""Prove that packed conversations give the logits of transformers' own path: processor, chat template, model.

python training/check_packing.py src/keepsight/demo/checkpoint
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from conversations import BOS, MODEL, PICTURE, USER, Conversation, Turn
from demo_model import decode, encode_patches, load_model, load_processor, usual_position_rows
from keepsight.demo.draw_scene import draw_scene
from keepsight.demo.scenes import Scene, plain_look, random_scene
from packed_conversations import Packer

QUESTIONS = ("What is in the second picture?", "List the pictures.", "Describe the last image.")
MAX_DIFFERENCE = 1e-4


def check_packing(checkpoint: Path) -> float:
    """Return the largest difference in the first answer logits between three packed questions and separate chats."""
    model = load_model(checkpoint, torch.float32).eval()
    processor = load_processor(checkpoint)
    packer = Packer(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    random = Random(5)
    scenes = tuple(random_scene(random, 2, look=plain_look(224)) for _ in range(3))
    opening = BOS + USER + PICTURE * 3
    branches = [(Turn(question + MODEL, "Yes.", "check"),) for question in QUESTIONS]
    batch = packer.pack([Conversation(scenes, opening, tuple(branches))], with_patch_labels=False)
    assert batch.pixels is not None
    with torch.no_grad():
        features = encode_patches(model, batch.pixels, usual_position_rows(3))
        logits = decode(model, batch, features).logits
        # The first label of each answer follows the last token of the prompt.
        firsts = logits[:: len(packer.encode("Yes.<end_of_turn>"))]
        expected = torch.stack([_own_path(model, processor, scenes, question) for question in QUESTIONS])
    return float((firsts - expected).abs().max())


def _own_path(model: Any, processor: Any, scenes: Sequence[Scene], question: str) -> Tensor:
    content = [*({"type": "image"} for _ in scenes), {"type": "text", "text": question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    pictures = [draw_scene(scene) for scene in scenes]
    inputs = processor(text=[prompt], images=[pictures], return_tensors="pt", add_special_tokens=False)
    inputs.pop("num_crops", None)
    logits: Tensor = model(**inputs).logits
    return logits[0, -1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare packed conversations with transformers' own path.")
    parser.add_argument("checkpoint", type=Path)
    difference = check_packing(parser.parse_args().checkpoint)
    print(f"largest difference of logits: {difference:.1e}")
    if difference > MAX_DIFFERENCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
