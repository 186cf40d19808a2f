"""Qwen3-VL: its tower also outputs vectors added after the decoder's first layers; the rest is as in other models."""

from pathlib import Path
from typing import Self

from keepsight.models.layers import Placement
from keepsight.models.qwen3_vl.config import Qwen3VLConfig
from keepsight.models.qwen3_vl.vision_tower import VisionTower
from keepsight.models.qwen_model import QwenModel


class Qwen3VL(QwenModel):
    def __init__(self, config: Qwen3VLConfig, place: Placement) -> None:
        vision = config.vision
        media_width = config.text.hidden_size * (1 + len(vision.deep_layers))
        super().__init__(config.text, vision.patch_size, media_width, place)
        self.config = config
        self.tower = VisionTower(vision, place)

    @classmethod
    def from_checkpoint(cls, directory: Path, place: Placement, room: int | None = None) -> Self:
        return cls(Qwen3VLConfig.from_checkpoint(directory), place).load(directory, room)
