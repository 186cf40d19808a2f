"""What lies under each patch of a picture, and in each soft token: dense labels that teach long before answers can.

No label of a patch says where in the picture it lies: the tower must not know. The labels of soft tokens do: they are
for the decoder, which reads it off their order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw

from keepsight.demo.draw_scene import paint_digit, paint_silhouette
from keepsight.demo.scenes import COLOURS, POSITIONS, SHAPES, SIZES, Scene

GRID = 8
PATCH = 14
SIDE = GRID * PATCH
# A patch belongs to the thing that covers most of it, if that is at least this much.
MIN_COVER = 0.08

COLOUR_NAMES = tuple(COLOURS)
# Label 0 means "none" in each of them. Last: does the center of a thing lie in the patch?
PATCH_CLASSES = (1 + len(COLOURS), 1 + len(SHAPES), 1 + len(SIZES), 1 + 10, 2)
SLOT_CLASSES = (*PATCH_CLASSES[:4], 1 + len(POSITIONS))
SLOTS = 4


# Labels at a shape's name in a question: the shape's count and, if there is only one, its colour and cell.
NOUN_CLASSES = (5, len(COLOURS), len(POSITIONS))
UNKNOWN = -100


def label_noun(shape: str, scene: Scene) -> tuple[int, int, int]:
    things = [thing for thing in scene.things if thing.shape == shape]
    if len(things) != 1:
        return len(things), UNKNOWN, UNKNOWN
    return 1, COLOUR_NAMES.index(things[0].colour), things[0].cell


@dataclass(frozen=True)
class _Mark:
    """A thing or a digit: its labels, its cell, its center."""

    names: tuple[int, int, int, int]
    cell: int
    x: float
    y: float


@dataclass(frozen=True)
class PatchLabels:
    classes: torch.Tensor  # [pictures, patches, len(PATCH_CLASSES)] int64
    offsets: torch.Tensor  # [pictures, patches, 2] from the patch to the center of its thing, in patches
    slots: torch.Tensor  # [pictures, soft tokens, len(SLOT_CLASSES)] int64: what has its center in the soft token

    @property
    def is_covered(self) -> torch.Tensor:
        return self.classes[..., 1] + self.classes[..., 3] > 0


def label_patches(scenes: list[Scene]) -> PatchLabels:
    classes, offsets, slots = zip(*map(_label_scene, scenes), strict=True)
    return PatchLabels(*(torch.from_numpy(np.stack(arrays)) for arrays in (classes, offsets, slots)))


def _label_scene(scene: Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    marks = _marks(scene)
    owner = _owners(scene, len(marks))
    slots = np.zeros((SLOTS * SLOTS, len(SLOT_CLASSES)), dtype=np.int64)
    classes = np.zeros((GRID * GRID, len(PATCH_CLASSES)), dtype=np.int64)
    offsets = np.zeros((GRID * GRID, 2), dtype=np.float32)
    columns, rows = np.meshgrid(np.arange(GRID) + 0.5, np.arange(GRID) + 0.5)
    patches = np.stack([columns.ravel(), rows.ravel()], axis=1)
    for index, mark in enumerate(marks):
        is_owned = owner == index
        classes[is_owned, :4] = mark.names
        offsets[is_owned] = (np.array([mark.x, mark.y]) * GRID - patches[is_owned]).astype(np.float32)
        classes[_square(mark, GRID), 4] = 1
        slots[_square(mark, SLOTS)] = (*mark.names, mark.cell)
    return classes, offsets, slots


def _square(mark: _Mark, side: int) -> int:
    return int(mark.y * side) * side + int(mark.x * side)


def _marks(scene: Scene) -> list[_Mark]:
    """The things of a scene, or the digits of its number. 0 stands for what they lack."""
    marks = [
        _Mark(
            (1 + COLOUR_NAMES.index(thing.colour), 1 + SHAPES.index(thing.shape), 1 + SIZES.index(thing.size), 0),
            1 + thing.cell,
            thing.x,
            thing.y,
        )
        for thing in scene.things
    ]
    if scene.number is not None:
        number, digits = scene.number, str(scene.number.value)
        for place, digit in enumerate(digits):
            x = number.x + (place - (len(digits) - 1) / 2) * number.digit_width
            marks.append(_Mark((0, 0, 0, 1 + int(digit)), 0, x, number.y))
    return marks


def _owners(scene: Scene, num_marks: int) -> np.ndarray:
    """Per patch the index of the mark that it belongs to, or -1."""
    scale = SIDE / min(scene.look.width, scene.look.height)
    silhouettes = Image.new("L", (round(scene.look.width * scale), round(scene.look.height * scale)), 0)
    draw = ImageDraw.Draw(silhouettes)
    draw.fontmode = "1"
    for index, thing in enumerate(scene.things):
        paint_silhouette(draw, thing, index + 1)
    if scene.number is not None:
        for place, digit in enumerate(str(scene.number.value)):
            paint_digit(draw, scene.number, place, digit, place + 1)
    return _majority(np.asarray(silhouettes.resize((SIDE, SIDE), Image.Resampling.NEAREST)), num_marks)


def _majority(silhouettes: np.ndarray, num_marks: int) -> np.ndarray:
    tiles = silhouettes.reshape(GRID, PATCH, GRID, PATCH).transpose(0, 2, 1, 3).reshape(GRID * GRID, -1)
    cover = np.stack([(tiles == mark + 1).mean(axis=1) for mark in range(num_marks)], axis=1)
    return np.where(cover.max(axis=1) >= MIN_COVER, cover.argmax(axis=1), -1)
