"""How many answers a model in training gets right when each token is predicted from the right ones before it.

Much cheaper than generating them, and close to it: a greedy answer is right exactly if every such token is.
"""

from collections import defaultdict
from random import Random
from typing import Any

import torch

from conversations import Conversation, ConversationMaker
from demo_model import decode, encode_patches, usual_position_rows
from packed_conversations import Batch, Packer


def held_out_batches(packer: Packer, rank: int) -> list[Batch]:
    """Return batches that are the same in every run and different in each process, from their own random stream."""
    maker = ConversationMaker(Random(f"held out {rank}"), num_branches=6)
    chats: list[list[Conversation]] = [[maker.about_one_picture() for _ in range(24)] for _ in range(5)]
    chats += [[maker.about_several_pictures() for _ in range(12)] for _ in range(6)]
    chats += [[maker.without_picture() for _ in range(3)]]
    return [packer.pack(each, with_patch_labels=False) for each in chats]


def count_right_answers(model: Any, batch: Batch) -> dict[str, tuple[int, int]]:
    """Return, per kind, the number of fully right answers and the number of all answers."""
    # Without any shift, as the model is used. Not under no_grad: that would compile every layer once more.
    features = (
        None if batch.pixels is None else encode_patches(model, batch.pixels, usual_position_rows(len(batch.pixels)))
    )
    decoded = decode(model, batch, features)
    is_right = torch.ones(len(batch.kinds), dtype=torch.bool)
    is_right[batch.answers[batch.answers >= 0][decoded.logits.argmax(-1) != decoded.targets]] = False
    counts: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for kind, right in zip(batch.kinds, is_right.tolist(), strict=True):
        num_right, num_all = counts[kind]
        counts[kind] = (num_right + right, num_all + 1)
    return dict(counts)


def format_accuracies(counts: list[dict[str, tuple[int, int]]]) -> str:
    kinds = sorted({kind for each in counts for kind in each})
    parts = []
    for kind in kinds:
        num_right = sum(each.get(kind, (0, 0))[0] for each in counts)
        num_all = sum(each.get(kind, (0, 0))[1] for each in counts)
        parts.append(f"{kind} {num_right / num_all:.2f}({num_all})")
    return ", ".join(parts)
