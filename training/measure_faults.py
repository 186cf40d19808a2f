"""Which mistakes of a server would show in the answers? Each is made on purpose, in transformers.

python training/measure_faults.py src/keepsight/demo/checkpoint --n 40
"""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ask_demo import Chat, Demo
from held_out_chats import EXAMS, held_out_chats

KINDS = ("describe_one", "describe_several", "describe_number", "where", "count", "nth_describe_one", "list")
GRID = 4


def transposed(soft_tokens: Tensor) -> Tensor:
    """Return soft tokens column by column instead of row by row."""
    grid = soft_tokens.view(len(soft_tokens), GRID, GRID, -1)
    return grid.transpose(1, 2).reshape(soft_tokens.shape)


def rolled(soft_tokens: Tensor) -> Tensor:
    return soft_tokens.roll(1, dims=1)


def reversed_order(soft_tokens: Tensor) -> Tensor:
    return soft_tokens.flip(1)


def swapped_pictures(soft_tokens: Tensor) -> Tensor:
    return soft_tokens.roll(1, dims=0)


def scaled_like_text(soft_tokens: Tensor) -> Tensor:
    return soft_tokens * math.sqrt(soft_tokens.shape[-1])


SOFT_TOKEN_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "soft tokens column by column": transposed,
    "soft tokens late by one": rolled,
    "soft tokens backwards": reversed_order,
    "pictures of the batch swapped": swapped_pictures,
    "soft tokens scaled like text": scaled_like_text,
}


@contextmanager
def soft_token_fault(model: Any, fault: Callable[[Tensor], Tensor]) -> Iterator[None]:
    projector = model.model.multi_modal_projector
    handle = projector.register_forward_hook(lambda module, inputs, output: fault(output))
    try:
        yield
    finally:
        handle.remove()


def _causal_pictures(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {"token_type_ids": torch.zeros_like(inputs["token_type_ids"])}


def _blue_first(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {"pixel_values": inputs["pixel_values"].flip(1)}


def _sides_swapped(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {"pixel_values": inputs["pixel_values"].transpose(2, 3)}


INPUT_FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "causal attention inside pictures": _causal_pictures,
    "blue, green, red": _blue_first,
    "width and height swapped": _sides_swapped,
}


class FaultyDemo(Demo):
    """`input_fault` spoils what the processor made."""

    input_fault: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def encode(self, chats: Any) -> dict[str, Any]:
        inputs = super().encode(chats)
        return self.input_fault(inputs) if self.input_fault else inputs


def measure(demo: Demo, chats: dict[str, list[Chat]]) -> dict[str, float]:
    accuracies = {}
    for kind, cases in chats.items():
        answers = demo.answer(cases)
        num_right = sum(chat.answer == answer for chat, answer in zip(cases, answers, strict=True))
        accuracies[kind] = num_right / len(cases)
    return accuracies


def _rows(demo: FaultyDemo, chats: dict[str, list[Chat]]) -> Iterator[tuple[str, dict[str, float]]]:
    yield "none", measure(demo, chats)
    for name, fault in SOFT_TOKEN_FAULTS.items():
        with soft_token_fault(demo.model, fault):
            yield name, measure(demo, chats)
    for name, demo.input_fault in INPUT_FAULTS.items():
        yield name, measure(demo, chats)
    demo.input_fault = None
    backwards = {kind: [replace(chat, scenes=chat.scenes[::-1]) for chat in each] for kind, each in chats.items()}
    yield "pictures of a request backwards", measure(demo, backwards)


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of right answers under deliberate faults.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--n", type=int, default=40, help="chats of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    demo = FaultyDemo(options.checkpoint, torch.float32)
    every_kind = held_out_chats(EXAMS[0], options.n, seed=2)
    print("| fault | " + " | ".join(KINDS) + " |")
    print("|---" * (len(KINDS) + 1) + "|")
    for name, accuracies in _rows(demo, {kind: every_kind[kind] for kind in KINDS}):
        print(f"| {name} | " + " | ".join(f"{100 * accuracies[kind]:.0f}" for kind in KINDS) + " |", flush=True)


if __name__ == "__main__":
    main()
