"""Qwen3-VL: pictures to embeddings, by its tower; the rest is as in other models."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Self

from torch import Tensor

from keepsight.models.layers import Placement, WeightSlot, under
from keepsight.models.model import ModelShape
from keepsight.models.qwen3_vl.config import Qwen3VLConfig
from keepsight.models.qwen3_vl.vision_tower import VisionTower
from keepsight.models.qwen3_vl.weight_names import canonical_name
from keepsight.models.vision_language_model import VisionLanguageModel, shape_of


class Qwen3VL(VisionLanguageModel):
    def __init__(self, config: Qwen3VLConfig, place: Placement) -> None:
        super().__init__(config.text, _shape_of(config), place)
        self.config = config
        self.tower = VisionTower(config.vision, place)

    @classmethod
    def from_checkpoint(cls, directory: Path, place: Placement, room: int | None = None) -> Self:
        """`room`: bytes of memory that the weights may take."""
        model = cls(Qwen3VLConfig.from_checkpoint(directory), place)
        model.load(directory, canonical_name, lambda _name: False, room)
        return model

    def encode_in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        return (yield from self.tower.in_parts(pixels))

    def slots(self) -> Iterator[WeightSlot]:
        yield from super().slots()
        yield from under("tower.", self.tower.slots())


def _shape_of(config: Qwen3VLConfig) -> ModelShape:
    text, vision = config.text, config.vision
    return shape_of(
        text,
        media_width=text.hidden_size * (1 + len(vision.deep_layers)),
        patch_size=vision.patch_size,
        tokens_per_image=0,
        sees_pictures_whole=False,
    )
