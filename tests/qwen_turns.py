"""Pictures and films for small checkpoints like Qwen's, and a conversation about them, judged by transformers."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keepsight import LLM, SamplingParams
from keepsight.requests import Pixels
from tests.drawn import ask
from tests.qwen_checkpoint import reference_answer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def shown(*pictures: Pixels) -> list[dict[str, Any]]:
    return [{"type": "image", "image": each} for each in pictures]


def film(num_frames: int, seed: int = 0) -> Pixels:
    """Return a film whose size needs no resizing."""
    return np.random.default_rng(seed).integers(0, 256, (num_frames, 64, 96, 3), np.uint8)


class LastTurn(NamedTuple):
    conversation: list[dict[str, Any]]
    # transformers' answer.
    token_ids: list[int]


def expect_reference_answers_in_turns(llm: LLM, checkpoint: tuple[Path, Any], question: str) -> LastTurn:
    """Ask about two pictures, then about a third one. The answers must be those of transformers."""
    first, second, third = picture(40, 60, 1), picture(150, 40, 2), picture(33, 33, 3)
    conversation = ask(*shown(first, second), question)
    directory, reference = checkpoint
    for pictures in ([first, second], [first, second, third]):
        [output] = llm.chat(conversation, GREEDY)
        theirs = reference_answer(reference, directory, output.prompt_token_ids, pictures, 8)
        assert output.outputs[0].token_ids[: len(theirs)] == theirs
        assistant = {"role": "assistant", "content": [{"type": "text", "text": "Squares."}]}
        conversation = [*conversation, assistant, *ask(*shown(third), "One more.")]
    return LastTurn(conversation[:-2], theirs)
