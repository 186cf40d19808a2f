"""Qwen2.5-VL: encodes pictures with its tower; the rest is shared with other models."""

from pathlib import Path
from typing import Self

from keepsight.models.layers import Placement
from keepsight.models.qwen2_5_vl.config import Qwen25VLConfig
from keepsight.models.qwen2_5_vl.vision_tower import VisionTower
from keepsight.models.qwen_model import QwenModel


class Qwen25VL(QwenModel):
    def __init__(self, config: Qwen25VLConfig, place: Placement) -> None:
        super().__init__(config.text, config.vision.patch_size, config.text.hidden_size, place)
        self.config = config
        self.tower = VisionTower(config.vision, place)

    @classmethod
    def from_checkpoint(cls, directory: Path, place: Placement, room: int | None = None) -> Self:
        return cls(Qwen25VLConfig.from_checkpoint(directory), place).load(directory, room)
