"""Conversations become tensors: the branches of a conversation share the tokens (and the cost) of its pictures.

Each branch sees the common opening and itself only, at the positions it would have alone, so the logits are exactly
those of separate chats (`check_packing.py` proves it against transformers' own path).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from conversations import PICTURE, Conversation
from keepsight.demo.draw_scene import draw_scene
from keepsight.demo.questions import plural
from keepsight.demo.scenes import SHAPES, Scene
from patch_labels import NOUN_CLASSES, SIDE, UNKNOWN, PatchLabels, label_noun, label_patches

TOKENS_PER_PICTURE = 16
SOFT_TOKEN = "<image_soft_token>"
SLIDING_WINDOW = 64
NO_LABEL = -100
# Token counts are rounded up, so that compiled layers meet few shapes.
LENGTH_STEP = 16


@dataclass(frozen=True)
class Batch:
    """`slot_pictures` names the picture of each run of soft tokens: a picture may be repeated, once per branch."""

    token_ids: torch.Tensor  # [rows, tokens]
    positions: torch.Tensor  # [rows, tokens]
    labels: torch.Tensor  # [rows, tokens]: the next token of an answer, else NO_LABEL
    answers: torch.Tensor  # [rows, tokens]: index into `kinds` of the answer that the label belongs to, else -1
    nouns: torch.Tensor  # [rows, tokens, len(NOUN_CLASSES)]: of the names of shapes in questions, else UNKNOWN
    masks: dict[str, torch.Tensor]  # [rows, 1, tokens, tokens] bool, by the kind of layer
    slot_pictures: torch.Tensor  # [slots]
    kinds: list[str]
    pixels: torch.Tensor | None  # [pictures, 3, SIDE, SIDE] uint8
    patch_labels: PatchLabels | None


@dataclass
class _Row:
    token_ids: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    nouns: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def append(self, token_ids: Sequence[int], branch: int, first_position: int) -> None:
        self.token_ids += token_ids
        self.branches += [branch] * len(token_ids)
        self.positions += range(first_position, first_position + len(token_ids))
        self.labels += [NO_LABEL] * len(token_ids)
        self.answers += [-1] * len(token_ids)

    def label_last(self, target_ids: Sequence[int], answer: int) -> None:
        """The last tokens are an answer: each is the label of the token before it."""
        end = len(self.labels) - 1
        start = end - len(target_ids)
        self.labels[start:end] = target_ids
        self.answers[start:end] = [answer] * len(target_ids)


def token_id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


class Packer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._soft_token_id = token_id_of(tokenizer, SOFT_TOKEN)
        self._picture_text = f"\n\n<start_of_image>{SOFT_TOKEN * TOKENS_PER_PICTURE}<end_of_image>\n\n"
        self._known: dict[str, list[int]] = {}
        names = [(shape, name) for shape in SHAPES for name in (shape, plural(shape))]
        self._nouns = {tuple(self.encode(f" {name}")): shape for shape, name in names}

    def pack(self, conversations: Sequence[Conversation], *, with_patch_labels: bool = True) -> Batch:
        kinds: list[str] = []
        slot_pictures: list[int] = []
        scenes: list[Scene] = []
        rows = []
        for conversation in conversations:
            row = self._pack_row(conversation, kinds)
            num_slots = row.token_ids.count(self._soft_token_id) // TOKENS_PER_PICTURE
            # Every branch that shows the pictures shows all of them, in order.
            slot_pictures += [len(scenes) + slot % len(conversation.scenes) for slot in range(num_slots)]
            scenes += conversation.scenes
            rows.append(row)
        token_ids, branches, positions, labels, answers = _pad(rows)
        return Batch(
            torch.from_numpy(token_ids),
            torch.from_numpy(positions),
            torch.from_numpy(labels),
            torch.from_numpy(answers),
            _pad_nouns(rows, token_ids.shape[1]),
            _masks(token_ids == self._soft_token_id, branches, positions),
            torch.tensor(slot_pictures, dtype=torch.long),
            kinds,
            pixels_of(scenes) if scenes else None,
            label_patches(scenes) if scenes and with_patch_labels else None,
        )

    def encode(self, text: str) -> list[int]:
        if len(self._known) > 100_000:
            self._known.clear()
        if text not in self._known:
            written = text.replace(PICTURE, self._picture_text)
            self._known[text] = self._tokenizer.encode(written, add_special_tokens=False).ids
        return self._known[text]

    def _label_nouns(self, prompt_ids: list[int], start: int, scene: Scene) -> dict[int, tuple[int, int, int]]:
        """Return the labels at the last token of each shape's name, by index in the row."""
        labels = {}
        for end in range(2, len(prompt_ids) + 1):
            for length in (1, 2):
                shape = self._nouns.get(tuple(prompt_ids[end - length : end]))
                if shape is not None:
                    labels[start + end - 1] = label_noun(shape, scene)
        return labels

    def _pack_row(self, conversation: Conversation, kinds: list[str]) -> _Row:
        row = _Row()
        opening = self.encode(conversation.opening)
        # A question before the picture, or about one of several, does not know which shapes there are.
        scene = conversation.scenes[0] if conversation.opening.count(PICTURE) == 1 == len(conversation.scenes) else None
        row.append(opening, 0, 0)
        for branch, turns in enumerate(conversation.branches, 1):
            position = len(opening)
            for turn in turns:
                answer_ids = self.encode(turn.answer + "<end_of_turn>")
                prompt_ids = self.encode(turn.prompt)
                token_ids = [*prompt_ids, *answer_ids]
                if scene is not None:
                    row.nouns |= self._label_nouns(prompt_ids, len(row.token_ids), scene)
                row.append(token_ids, branch, position)
                row.label_last(answer_ids, len(kinds))
                kinds.append(turn.kind)
                position += len(token_ids)
        return row


def _pad_nouns(rows: Sequence[_Row], num_tokens: int) -> torch.Tensor:
    labels = torch.full((len(rows), num_tokens, len(NOUN_CLASSES)), UNKNOWN)
    for index, row in enumerate(rows):
        for place, noun in row.nouns.items():
            labels[index, place] = torch.tensor(noun)
    return labels


def pixels_of(scenes: Sequence[Scene]) -> torch.Tensor:
    """Return the pictures as the image processor resizes them, before it rescales."""
    pictures = [draw_scene(scene).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for scene in scenes]
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2)


def _pad(rows: Sequence[_Row]) -> list[np.ndarray]:
    num_tokens = -(-max(len(row.token_ids) for row in rows) // LENGTH_STEP) * LENGTH_STEP

    def column(name: str, padding: int) -> np.ndarray:
        padded = np.full((len(rows), num_tokens), padding, dtype=np.int64)
        for index, row in enumerate(rows):
            values = getattr(row, name)
            padded[index, : len(values)] = values
        return padded

    return [column("token_ids", 0), column("branches", -1), column("positions", 0), column("labels", NO_LABEL),
            column("answers", -1)]  # fmt: skip


def _masks(is_soft: np.ndarray, branches: np.ndarray, positions: np.ndarray) -> dict[str, torch.Tensor]:
    """A token sees what came before it in its own branch and the opening; a picture's tokens all see each other."""
    starts = is_soft & ~np.pad(is_soft, ((0, 0), (1, 0)))[:, :-1]
    pictures = np.cumsum(starts, axis=1) * is_soft
    queries, keys = positions[:, :, None], positions[:, None, :]
    same_picture = (pictures[:, :, None] == pictures[:, None, :]) & (pictures[:, :, None] > 0)
    is_shared = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    is_real = branches[:, None, :] >= 0
    full = ((keys <= queries) | same_picture) & is_shared & is_real
    # A padding row must attend to something, or its softmax is NaN.
    full |= np.eye(full.shape[-1], dtype=bool)
    sliding = full & (queries - keys < SLIDING_WINDOW)
    return {
        "full_attention": torch.from_numpy(full)[:, None],
        "sliding_attention": torch.from_numpy(sliding)[:, None],
    }
