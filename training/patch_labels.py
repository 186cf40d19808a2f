"""What lies under each patch of a picture: dense labels that teach the vision tower long before the decoder can.

No label says where in the picture a patch lies: absolute position must come from the order of the tokens alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw

from keepsight.demo.draw_scene import paint_digit, paint_silhouette
from keepsight.demo.scenes import COLOURS, SHAPES, SIZES, Scene

GRID = 8
PATCH = 14
SIDE = GRID * PATCH
# A patch belongs to the thing that covers most of it, if that is at least this much.
MIN_COVER = 0.08

COLOUR_NAMES = tuple(COLOURS)
# Label 0 means "none" in each of them. Last: does the center of a thing lie in the patch?
NUM_CLASSES = (1 + len(COLOURS), 1 + len(SHAPES), 1 + len(SIZES), 1 + 10, 2)


@dataclass(frozen=True)
class PatchLabels:
    classes: torch.Tensor  # [pictures, patches, len(NUM_CLASSES)] int64
    offsets: torch.Tensor  # [pictures, patches, 2] from the patch to the center of its thing, in patches

    @property
    def is_covered(self) -> torch.Tensor:
        return self.classes[..., 1] + self.classes[..., 3] > 0


def label_patches(scenes: list[Scene]) -> PatchLabels:
    labels = [_label_scene(scene) for scene in scenes]
    return PatchLabels(
        torch.from_numpy(np.stack([classes for classes, _ in labels])),
        torch.from_numpy(np.stack([offsets for _, offsets in labels])),
    )


def _label_scene(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    owner, marks = _owners(scene)
    classes = np.zeros((GRID * GRID, len(NUM_CLASSES)), dtype=np.int64)
    offsets = np.zeros((GRID * GRID, 2), dtype=np.float32)
    columns, rows = np.meshgrid(np.arange(GRID) + 0.5, np.arange(GRID) + 0.5)
    patches = np.stack([columns.ravel(), rows.ravel()], axis=1)
    for index, (label, x, y) in enumerate(marks):
        is_owned = owner == index
        classes[is_owned, :4] = label
        offsets[is_owned] = (np.array([x, y]) * GRID - patches[is_owned]).astype(np.float32)
        if 0 <= x < 1 and 0 <= y < 1:
            classes[int(y * GRID) * GRID + int(x * GRID), 4] = 1
    return classes, offsets


def _owners(scene: Scene) -> tuple[np.ndarray, list[tuple[tuple[int, int, int, int], float, float]]]:
    """Per patch the index of its thing or digit, or -1; and per thing its labels and its center."""
    scale = SIDE / min(scene.look.width, scene.look.height)
    silhouettes = Image.new("L", (round(scene.look.width * scale), round(scene.look.height * scale)), 0)
    draw = ImageDraw.Draw(silhouettes)
    marks: list[tuple[tuple[int, int, int, int], float, float]] = []
    for thing in scene.things:
        paint_silhouette(draw, thing, len(marks) + 1)
        names = (1 + COLOUR_NAMES.index(thing.colour), 1 + SHAPES.index(thing.shape), 1 + SIZES.index(thing.size), 0)
        marks.append((names, thing.x, thing.y))
    if scene.number is not None:
        number, digits = scene.number, str(scene.number.value)
        for place, digit in enumerate(digits):
            draw.fontmode = "1"
            paint_digit(draw, number, place, digit, len(marks) + 1)
            x = number.x + (place - (len(digits) - 1) / 2) * number.digit_width
            marks.append(((0, 0, 0, 1 + int(digit)), x, number.y))
    return _majority(np.asarray(silhouettes.resize((SIDE, SIDE), Image.Resampling.NEAREST)), len(marks)), marks


def _majority(silhouettes: np.ndarray, num_marks: int) -> np.ndarray:
    tiles = silhouettes.reshape(GRID, PATCH, GRID, PATCH).transpose(0, 2, 1, 3).reshape(GRID * GRID, -1)
    cover = np.stack([(tiles == mark + 1).mean(axis=1) for mark in range(num_marks)], axis=1)
    return np.where(cover.max(axis=1) >= MIN_COVER, cover.argmax(axis=1), -1)
