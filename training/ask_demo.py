"""Ask a checkpoint through transformers' public path: processor, chat template, greedy generation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from demo_model import load_model, load_processor
from keepsight.demo.draw_scene import draw_scene
from keepsight.demo.scenes import Scene

MAX_NEW_TOKENS = 96


@dataclass(frozen=True)
class Chat:
    """One prompt, all of its turns, and the right answer to the last one.

    Its pictures are drawn when they are needed: thousands of them would not fit into a small memory.
    """

    kind: str
    messages: list[dict[str, Any]]
    scenes: Sequence[Scene]
    answer: str


class Demo:
    def __init__(self, checkpoint: Path, dtype: torch.dtype) -> None:
        self.processor = load_processor(checkpoint)
        self.model = load_model(checkpoint, dtype).eval()

    def answer(self, chats: Sequence[Chat], batch_size: int = 20) -> list[str]:
        """In the order of the chats. Chats with and without pictures cannot share a batch."""
        answers: list[str] = []
        for _, group in groupby(chats, key=lambda chat: bool(chat.scenes)):
            for batch in _batches(list(group), batch_size):
                answers += self._answer_batch(batch)
        return answers

    def encode(self, chats: Sequence[Chat]) -> dict[str, Any]:
        prompts = [
            self.processor.apply_chat_template(chat.messages, add_generation_prompt=True, tokenize=False)
            for chat in chats
        ]
        pictures = [[draw_scene(scene) for scene in chat.scenes] for chat in chats] if chats[0].scenes else None
        # The template has written <bos> already.
        inputs = self.processor(
            text=prompts, images=pictures, return_tensors="pt", padding=True, add_special_tokens=False
        )
        inputs.pop("num_crops", None)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return dict(inputs)

    def _answer_batch(self, chats: Sequence[Chat]) -> list[str]:
        inputs = self.encode(chats)
        tokens = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new_tokens = tokens[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.processor.tokenizer.batch_decode(new_tokens, skip_special_tokens=True)]


def _batches(chats: list[Chat], size: int) -> list[list[Chat]]:
    return [chats[start : start + size] for start in range(0, len(chats), size)]


def user_message(num_pictures: int, text: str, *, text_first: bool = False) -> dict[str, Any]:
    pictures: list[dict[str, str]] = [{"type": "image"}] * num_pictures
    words = [{"type": "text", "text": text}] if text else []
    return {"role": "user", "content": words + pictures if text_first else pictures + words}


def model_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}
